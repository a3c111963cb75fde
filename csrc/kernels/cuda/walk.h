// walk(), the loop of all kernels: over many tensors at once, in chunks, with the widest accesses that their addresses
// allow.
//
// A launch gets a batch of rows by value, as its parameter. So no table in device memory has to be filled or waited
// for. A row stands for one tensor: words (mostly addresses) and a number of elements. A block takes one chunk of one
// row, which it finds by the running sums of the rows' chunks. Its threads then cover each element of the chunk once.
// An operation (*_ops.h) works on several packs of elements at a time, so that all their loads are in flight.
//
// All of this runs on the host as well, one thread after the other: tests/cpp/test_cuda_walk.cc.
#pragma once

#include "kernels/cuda/pack.h"

namespace sordino::kernels::cuda {

inline constexpr int kThreads = 256;

// Bytes of a chunk in a call of `call_bytes` bytes: those that a block's threads have in flight at once. A small call
// has smaller chunks, because few blocks would leave most of a GPU idle.
constexpr std::uint32_t chunk_bytes(std::size_t call_bytes) {
  constexpr std::uint32_t kLeast = 4 << 10, kMost = 16 << 10, kEnough = 512;
  return call_bytes <= std::size_t{kLeast} * kEnough ? kLeast : kMost;
}
// For sums, always the same, so that a row's sum does not depend on the other rows of the call.
inline constexpr std::uint32_t kSumChunk = 32 << 10;

// As many rows as fit: the `width` words of each, then the counts, then the numbers of chunks up to the end of each.
template <int kWords>
struct Batch {
  std::uint32_t rows, width, chunk;  // chunk: bytes per chunk, a multiple of 16
  std::uint64_t first_row;           // index in the call
  std::uint64_t words[kWords];

  static constexpr std::size_t most_rows(std::size_t width) { return kWords / (width + 2); }
  SORDINO_BOTH const std::uint64_t* row(std::uint32_t row) const { return words + row * width; }
  SORDINO_BOTH std::uint64_t count(std::uint32_t row) const { return words[rows * width + row]; }
  SORDINO_BOTH std::uint64_t chunks_up_to(std::uint32_t row) const { return words[rows * (width + 1) + row]; }
  SORDINO_BOTH std::uint64_t chunks_before(std::uint32_t row) const { return row == 0 ? 0 : chunks_up_to(row - 1); }
};

// A row as an operation sees it.
struct Row {
  const std::uint64_t* words;
  std::uint64_t index;  // in the call
  SORDINO_BOTH std::byte* at(std::uint32_t k) const { return reinterpret_cast<std::byte*>(words[k]); }
};

struct Chunk {
  std::uint32_t row;
  std::size_t begin, count;  // elements
};

template <class AnyBatch>
SORDINO_BOTH inline Chunk find_chunk(const AnyBatch& batch, std::uint64_t block, std::size_t size) {
  std::uint32_t low = 0, high = batch.rows - 1;
  while (low < high) {
    const std::uint32_t middle = (low + high) / 2;
    if (batch.chunks_up_to(middle) > block) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const std::size_t chunk = batch.chunk / size;
  const std::size_t begin = (block - batch.chunks_before(low)) * chunk, left = batch.count(low) - begin;
  return {low, begin, left < chunk ? left : chunk};
}

// Whether all addresses are equal modulo 16, so that the same single elements precede their packs.
SORDINO_BOTH inline bool aligned_alike(const std::uint64_t* addresses, std::uint32_t count) {
  std::uint64_t distances = 0;
  for (std::uint32_t k = 1; k < count; ++k) distances |= addresses[k] ^ addresses[0];
  return distances % kWidest == 0;
}

// Cover of a chunk: `head` single elements, `packs` of 16 bytes, then the rest of the `singles` single elements.
struct Cover {
  std::uint32_t head, packs, singles;
};
SORDINO_BOTH inline Cover cover(std::uint32_t count, std::uint64_t address, std::uint32_t size) {
  const std::uint32_t width = kWidest / size, ahead = static_cast<std::uint32_t>(0 - address) % kWidest / size;
  const std::uint32_t head = ahead < count ? ahead : count, packs = (count - head) / width;
  return {head, packs, count - packs * width};
}

// Kind of packs that an operation gets; see walk().
enum class Accesses { kSingle, kWide, kStored, kFixed };

// Calls apply<kWidth> for all packs of this thread.
template <int kWidth, class Operation>
SORDINO_BOTH inline void walk_packs(const Row& row, std::size_t begin, std::uint32_t packs, std::uint32_t thread,
                                    std::uint32_t threads, const Operation& operation,
                                    typename Operation::State& state) {
  constexpr int kAhead = Operation::template kAhead<kWidth>;
  for (std::uint32_t pack = thread; pack < packs; pack += kAhead * threads) {
    int live = 0;
    SORDINO_UNROLL
    for (int u = 0; u < kAhead; ++u) live += pack + u * threads < packs;
    operation.template apply<kWidth>(row, begin + std::size_t{pack} * kWidth, std::size_t{threads} * kWidth, live,
                                     state);
  }
}

// Runs thread `thread` of `threads` (32 or more) of block `block`. An operation has:
//   Element: the unit of a row's count;
//   State: what a thread keeps from one call of apply() to the next;
//   kAccesses: kSingle: only single elements; kWide: packs of 16 bytes if the row's first `lists` (a member) addresses
//     allow it, else single elements; kStored: packs of 16 bytes, aligned at the row's second address; kFixed: packs of
//     16 bytes, cut from the row's beginning. With kStored and kFixed, other addresses may have any alignment;
//   kAhead<kWidth>: number of packs that it gets at a time;
//   apply<kWidth>(row, i, step, live, state): works on the `live` packs at elements i, i + step and so on.
template <class AnyBatch, class Operation>
SORDINO_BOTH inline void walk(const AnyBatch& batch, std::uint64_t block, std::uint32_t thread, std::uint32_t threads,
                              const Operation& operation, typename Operation::State& state) {
  constexpr std::uint32_t kSize = sizeof(typename Operation::Element);
  constexpr Accesses kAccesses = Operation::kAccesses;
  constexpr int kWide = kWidest / static_cast<int>(kSize);
  const Chunk chunk = find_chunk(batch, block, kSize);
  const Row row{batch.row(chunk.row), batch.first_row + chunk.row};
  const auto count = static_cast<std::uint32_t>(chunk.count);
  // A chunk begins at a multiple of 16 bytes from the beginning of its row.
  Cover parts{0, 0, count};
  if constexpr (kAccesses == Accesses::kFixed) parts = cover(count, 0, kSize);
  if constexpr (kAccesses == Accesses::kStored) parts = cover(count, row.words[1], kSize);
  if constexpr (kAccesses == Accesses::kWide) {
    if (aligned_alike(row.words, operation.lists)) parts = cover(count, row.words[0], kSize);
  }
  if constexpr (kAccesses != Accesses::kSingle) {
    if (parts.packs != 0) {
      walk_packs<kWide>(row, chunk.begin + parts.head, parts.packs, thread, threads, operation, state);
    }
  }
  // With packs, there are fewer than 32 single elements: each thread has at most one, and does not use `step`.
  if (thread >= parts.singles) return;
  const std::size_t skipped = thread < parts.head ? 0 : std::size_t{parts.packs} * kWide;
  walk_packs<1>(row, chunk.begin + skipped, parts.singles, thread, threads, operation, state);
}

}  // namespace sordino::kernels::cuda
