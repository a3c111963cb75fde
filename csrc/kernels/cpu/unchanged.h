// Counts the elements that are the same in two arrays. Each step on a block is a separate loop, which compilers
// vectorize. All steps but the first find the block in the first-level cache. Included by impl.h only.
#pragma once

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/table.h"
#include "kernels/rounding.h"

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

constexpr std::size_t kCompared = 256;  // elements per block

// same[i] = 1 or 0.
template <class T>
void compare_bits(const std::byte* now, const std::byte* before, std::size_t count, std::uint8_t* same) {
  using Word = typename WordOf<sizeof(T)>::type;
  const Loose<Word>*a = loose<Word>(now), *b = loose<Word>(before);
  for (std::size_t i = 0; i < count; i += kLine / sizeof(T)) {
    prefetch(a + i);
    prefetch(b + i);
  }
  SORDINO_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) same[i] = a[i].value == b[i].value;
}

// same[i] |= the rounded values are equal.
template <class Float>
void compare_rounded(const Loose<Float>* a, const Loose<Float>* b, std::size_t count, Float scale, std::uint8_t* same) {
  SORDINO_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    const Float x = a[i].value * scale, y = b[i].value * scale;
    same[i] |= round_alike(x, y);
  }
}

template <class T>
void compare_rounded(const std::byte* now, const std::byte* before, std::size_t count, double scale,
                     std::uint8_t* same) {
  const Loose<T>*a = loose<T>(now), *b = loose<T>(before);
  if constexpr (std::is_floating_point_v<T>) {
    compare_rounded(a, b, count, static_cast<T>(scale), same);
  } else {
    Loose<float> x[kCompared], y[kCompared];
    for_lanes<T>(count, [&](auto lane, std::size_t i) {
      lane.store(x + i, lane.load(a + i));
      lane.store(y + i, lane.load(b + i));
    });
    compare_rounded(x, y, count, static_cast<float>(scale), same);
  }
}

inline std::size_t sum_of(const std::uint8_t* same, std::size_t count) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += same[i];
  return sum;
}

inline void count_changes(std::uint8_t* counters, const std::uint8_t* same, std::size_t count) {
  SORDINO_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t seen = counters[i];
    counters[i] = static_cast<std::uint8_t>(seen + ((same[i] ^ 1) & (seen != 255)));
  }
}

template <class T>
std::size_t count_same(const Comparison& c) {
  std::uint8_t same[kCompared];
  std::size_t total = 0;
  for (std::size_t begin = 0; begin < c.count; begin += kCompared) {
    const std::size_t count = c.count - begin < kCompared ? c.count - begin : kCompared, offset = begin * sizeof(T);
    const std::byte *now = c.now + offset, *before = c.before + offset;
    compare_bits<T>(now, before, count, same);
    std::size_t found = sum_of(same, count);
    if (found < count) {
      if constexpr (!std::is_integral_v<T>) {
        if (c.scale != 0) {
          compare_rounded<T>(now, before, count, c.scale, same);
          found = sum_of(same, count);
        }
      }
      if (c.kept != nullptr) __builtin_memcpy(c.kept + offset, now, count * sizeof(T));
      if (c.counters != nullptr) count_changes(c.counters + begin, same, count);
    }
    total += found;
  }
  return total;
}

constexpr void enter_comparisons(Table& table) {
  // Integers and bool, by their size in bytes.
  constexpr CountSameFn by_width[] = {nullptr,
                                      count_same<std::uint8_t>,
                                      count_same<std::uint16_t>,
                                      nullptr,
                                      count_same<std::uint32_t>,
                                      nullptr,
                                      nullptr,
                                      nullptr,
                                      count_same<std::uint64_t>};
  for (int code = 0; code < kDTypeCount; ++code) table.count_same[code] = by_width[size_of(static_cast<DType>(code))];
  table.count_same[static_cast<int>(DType::kFloat16)] = count_same<Half>;
  table.count_same[static_cast<int>(DType::kBFloat16)] = count_same<BFloat16>;
  table.count_same[static_cast<int>(DType::kFloat32)] = count_same<float>;
  table.count_same[static_cast<int>(DType::kFloat64)] = count_same<double>;
}

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
