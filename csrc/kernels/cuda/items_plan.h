// Conversion of the items of kernels/unchanged.h to tables of rows.
#pragma once

#include "base/rng.h"
#include "kernels/cuda/plan.h"
#include "kernels/unchanged.h"

namespace sordino::kernels::cuda {

// The type as which elements are compared. Without rounding, only bits count: an unsigned integer of the same size.
inline DType compared_as(DType type, bool rounded) {
  constexpr DType words[] = {DType::kUInt8, DType::kUInt16, DType::kUInt32, DType::kUInt64};
  std::size_t log2 = 0;
  while ((std::size_t{1} << log2) < size_of(type)) ++log2;
  return rounded ? type : words[log2];
}

// Calls visitor(tag, indices) for each type as which items are compared, with the indices of these items.
template <class Visitor>
void by_type(const Items& items, bool rounded, const Visitor& visitor) {
  std::vector<std::size_t> of_type[kDTypeCount];
  for (std::size_t item = 0; item < items.rows().size(); ++item) {
    of_type[static_cast<int>(compared_as(items.rows()[item].type, rounded))].push_back(item);
  }
  for (int code = 0; code < kDTypeCount; ++code) {
    if (of_type[code].empty()) continue;
    dispatch(static_cast<DType>(code), [&](auto tag) {
      using T = typename decltype(tag)::type;
      constexpr bool bits = std::is_unsigned_v<T>;
      if constexpr (bits || (std::is_class_v<T> && !std::is_same_v<T, Bool>) || std::is_floating_point_v<T>)
        visitor(tag, of_type[code]);
    });
  }
}

// Rows (now, before, counters or 0, item) of some items.
inline Table comparisons(const Items& items, std::span<const std::size_t> chosen, const std::byte* now,
                         const std::byte* before, const std::byte* counters) {
  Table table(4);
  for (const std::size_t item : chosen) {
    const Items::Row& row = items.rows()[item];
    const std::uint64_t seen = counters == nullptr ? 0 : word(counters + row.first_element);
    table.add({word(now + row.offset), word(before + row.offset), seen, item}, row.elements);
  }
  return table;
}

// Rows (counters) of some items.
inline Table counted(const Items& items, std::span<const std::size_t> chosen, const std::byte* counters) {
  Table table(1);
  for (const std::size_t item : chosen) {
    const Items::Row& row = items.rows()[item];
    table.add({word(counters + row.first_element)}, row.elements);
  }
  return table;
}

// Rows (saved, indices, now, item) of the samples of some items.
inline Table samples(const Items& items, std::span<const std::size_t> chosen, const std::byte* now,
                     const std::byte* indices, const std::byte* saved) {
  Table table(4);
  for (const std::size_t item : chosen) {
    const Items::Row& row = items.rows()[item];
    table.add({word(saved + row.first_saved), word(indices + row.first_sample * sizeof(std::uint32_t)),
               word(now + row.offset), item},
              row.samples);
  }
  return table;
}

// Rows (indices, elements, samples, the item's key).
inline Table draws(const Items& items, std::uint64_t key, const std::byte* indices) {
  Table table(4);
  std::uint64_t item = 0;
  for (const Items::Row& row : items.rows()) {
    table.add(
        {word(indices + row.first_sample * sizeof(std::uint32_t)), row.elements, row.samples, rng::key(key, item++)},
        row.samples);
  }
  return table;
}

// Rows (counters, indices, samples, skipped) of the items that have elements. A row begins at a multiple of 16 bytes,
// so its first `skipped` counters are not the item's.
inline Table selections(const Items& items, const std::byte* counters, const std::byte* indices) {
  Table table(4);
  for (const Items::Row& row : items.rows()) {
    if (row.elements == 0) continue;
    const std::uint64_t first = word(counters + row.first_element), before = first % kWidest;
    table.add({first - before, word(indices + row.first_sample * sizeof(std::uint32_t)), row.samples, before},
              before + row.elements);
  }
  return table;
}

}  // namespace sordino::kernels::cuda
