// Conversion of a call's tensors to batches (walk.h), each of which fits in one launch.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/cuda/walk.h"
#include "kernels/device_kernels.h"

namespace sordino::kernels::cuda {

// Words of a batch. There are three sizes, because the cost of a launch grows with the size of its parameters. Every
// driver allows 4 KiB of parameters, and drivers since 530 allow 32,764 bytes. The size between them is for a model of
// some hundred tensors. The rest of the parameters is for the operation.
inline constexpr int kFewWords = 448, kSomeWords = 1024, kManyWords = 4000;

// The words of all rows, row after row, and their counts.
struct Table {
  std::size_t width;
  std::vector<std::uint64_t> words;
  std::vector<std::size_t> counts;

  explicit Table(std::size_t width) : width(width) {}
  void add(std::initializer_list<std::uint64_t> row, std::size_t count) {
    for (const std::uint64_t word : row) words.push_back(word);
    counts.push_back(count);
  }
  std::size_t elements() const { return std::accumulate(counts.begin(), counts.end(), std::size_t{0}); }
};

inline std::uint64_t word(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }

inline Table table_of(const Rows& rows) {
  Table table(rows.width);
  for (std::byte* address : rows.addresses) table.words.push_back(word(address));
  table.counts = rows.counts;
  return table;
}

// Rows (source, destination) of bytes, for copies into the flat buffer or out of it.
inline Table copies(std::span<const Span> tensors, const std::byte* flat, bool into) {
  Table table(2);
  for (const Span& tensor : tensors) {
    if (tensor.data == nullptr || tensor.bytes == 0) continue;
    into ? table.add({word(tensor.data), word(flat)}, tensor.bytes)
         : table.add({word(flat), word(tensor.data)}, tensor.bytes);
    flat += tensor.bytes;
  }
  return table;
}

inline void check_floating(const char* function, DType type) {
  if (is_floating(type)) return;
  throw UsageError("kernels::cuda::" + std::string(function) + ": " + std::string(name_of(type)) +
                   " is not a floating type");
}

inline void check_width(const char* function, const Rows& rows, std::size_t width) {
  if (rows.width == width && rows.addresses.size() == width * rows.size()) return;
  throw UsageError("kernels::cuda::" + std::string(function) + " needs " + std::to_string(width) +
                   " addresses a row, not " + std::to_string(rows.width) + " (" +
                   std::to_string(rows.addresses.size()) + " in all for " + std::to_string(rows.size()) + " rows)");
}

// Calls launch(batch, chunks) for batches that together hold all rows, in order. `size`: bytes of an element.
template <int kWords, class Launch>
void plan_batches(const Table& table, std::size_t size, std::uint32_t chunk, const Launch& launch) {
  constexpr std::size_t kMostChunks = std::numeric_limits<std::int32_t>::max();  // blocks of a launch
  const std::size_t width = table.width, most = Batch<kWords>::most_rows(width), all = table.counts.size();
  if (most == 0) {
    throw UsageError("kernels::cuda: " + std::to_string(width) +
                     " addresses of one tensor are too many; the limit is " + std::to_string(kWords - 2));
  }
  Batch<kWords> batch;
  batch.width = static_cast<std::uint32_t>(width);
  batch.chunk = chunk;
  const std::size_t elements = chunk / size;
  for (std::size_t first = 0, rows; first < all; first += rows) {
    std::uint64_t ends[kWords];
    std::size_t chunks = 0;
    for (rows = 0; rows < std::min(most, all - first); ++rows) {
      const std::size_t count = table.counts[first + rows], more = count / elements + (count % elements != 0);
      if (rows != 0 && chunks + more > kMostChunks) break;
      ends[rows] = chunks += more;
    }
    if (chunks > kMostChunks) throw UsageError("kernels::cuda: a tensor is larger than any memory");
    batch.rows = static_cast<std::uint32_t>(rows);
    batch.first_row = first;
    std::size_t at = 0;
    for (std::size_t k = first * width; k < (first + rows) * width; ++k) batch.words[at++] = table.words[k];
    for (std::size_t k = first; k < first + rows; ++k) batch.words[at++] = table.counts[k];
    for (std::size_t k = 0; k < rows; ++k) batch.words[at++] = ends[k];
    launch(batch, static_cast<std::uint32_t>(chunks));
  }
}

template <class Launch>
void plan(const Table& table, std::size_t size, std::uint32_t chunk, const Launch& launch) {
  const std::size_t rows = table.counts.size();
  if (rows <= Batch<kFewWords>::most_rows(table.width)) {
    plan_batches<kFewWords>(table, size, chunk, launch);
  } else if (rows <= Batch<kSomeWords>::most_rows(table.width)) {
    plan_batches<kSomeWords>(table, size, chunk, launch);
  } else {
    plan_batches<kManyWords>(table, size, chunk, launch);
  }
}

}  // namespace sordino::kernels::cuda
