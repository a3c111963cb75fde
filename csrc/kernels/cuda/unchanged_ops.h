// The functions of kernels/unchanged.h as operations.
#pragma once

#include "base/rng.h"
#include "kernels/cuda/sum_ops.h"

namespace sordino::kernels::cuda {

// Number of elements that are the same, and of counters that are full.
struct SameCounts : Totals<std::int64_t, 2> {};

template <class T>
SORDINO_BOTH inline auto bits(T value) {
  return __builtin_bit_cast(typename WordOf<sizeof(T)>::type, value);
}

template <class T>
SORDINO_BOTH inline bool same(T a, T b, double scale) {
  if (bits(a) == bits(b)) return true;
  if constexpr (!std::is_integral_v<T>) {
    const auto factor = static_cast<Stage<T>>(scale);
    return scale != 0 && round_alike(decode(a) * factor, decode(b) * factor);
  } else {
    return false;
  }
}

// kernels::unchanged of rows (now, before, counters or 0, item).
template <class T>
struct Compare {
  using Element = T;
  using State = SameCounts;
  static constexpr Accesses kAccesses = Accesses::kWide;
  template <int kWidth>
  static constexpr int kAhead = kInFlight<T, kWidth>;

  std::uint32_t lists;
  double scale;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t step, int live, State& counts) const {
    constexpr int kPacks = kAhead<kWidth>;
    const std::size_t at = i * sizeof(T), stride = step * sizeof(T);
    Pack<T, kWidth> now[kPacks], before[kPacks];
    load_live(now, row.at(0) + at, stride, live);
    load_live(before, row.at(1) + at, stride, live);
    std::int32_t found = 0, full = 0;
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      if (u >= live) break;
      bool kept = true;
      Pack<std::uint8_t, kWidth> changed;
      SORDINO_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        const T a = now[u].values[e], b = before[u].values[e];
        kept &= bits(a) == bits(b);
        changed.values[e] = same(a, b, scale) ? 0 : 1;
        found += 1 - changed.values[e];
      }
      if (!kept) store(row.at(1) + at + u * stride, now[u]);
      if (row.words[2] != 0) full += count_changes(row.at(2) + i + u * step, changed);
    }
    counts.values[0] += found;
    counts.values[1] += full;
  }

 private:
  // Counters may be aligned differently from elements. Returns how many are full (255) afterwards.
  template <int kWidth>
  SORDINO_BOTH static std::int32_t count_changes(std::byte* counters, const Pack<std::uint8_t, kWidth>& changed) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(counters) % kWidth == 0;
    Pack<std::uint8_t, kWidth> seen =
        aligned ? load<std::uint8_t, kWidth>(counters) : load_each<std::uint8_t, kWidth>(counters);
    std::int32_t full = 0, more = 0;
    SORDINO_UNROLL
    for (int e = 0; e < kWidth; ++e) {
      const int one = changed.values[e] & (seen.values[e] != 255);
      seen.values[e] = static_cast<std::uint8_t>(seen.values[e] + one);
      full += seen.values[e] == 255;
      more += one;
    }
    if (more != 0) aligned ? store(counters, seen) : store_each(counters, seen);
    return full;
  }
};

// Stores the counts of a row. A row's word `item` is the index of its item. `full`, if not null, has one flag per row.
struct StoreCounts {
  std::int64_t* counts;
  std::uint8_t* full;
  std::uint32_t item;
  SORDINO_BOTH void operator()(const Row& row, const SameCounts& sums) const {
    counts[row.words[item]] = sums.values[0];
    if (full != nullptr) full[row.index] = sums.values[1] != 0;
  }
};

// Halves the counters of rows (counters) whose flag is set.
struct Age {
  using Element = std::uint8_t;
  using State = Nothing;
  static constexpr Accesses kAccesses = Accesses::kWide;
  template <int kWidth>
  static constexpr int kAhead = 1;

  std::uint32_t lists;
  const std::uint8_t* full;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t, int, State&) const {
    if (full[row.index] == 0) return;
    auto pack = load<std::uint8_t, kWidth>(row.at(0) + i);
    SORDINO_UNROLL
    for (int e = 0; e < kWidth; ++e) pack.values[e] /= 2;
    store(row.at(0) + i, pack);
  }
};

// kernels::draw of rows (indices, elements, samples, the item's key).
struct Draw {
  using Element = std::uint32_t;
  using State = Nothing;
  static constexpr Accesses kAccesses = Accesses::kSingle;
  template <int kWidth>
  static constexpr int kAhead = 1;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t, int, State&) const {
    const std::uint64_t elements = row.words[1];
    const double at = static_cast<double>(i) + rng::unit(rng::key(row.words[3], i));
    const auto index =
        static_cast<std::uint64_t>(at * static_cast<double>(elements) / static_cast<double>(row.words[2]));
    const auto last = static_cast<std::uint32_t>(elements - 1);
    store<std::uint32_t, 1>(row.at(0) + i * sizeof last, {{index < last ? static_cast<std::uint32_t>(index) : last}});
  }
};

// The sampled elements of rows (saved, indices, now, item).
template <class T, int kPacks>
struct Sampled {
  T values[kPacks];
  SORDINO_BOTH Sampled(const Row& row, std::size_t i, std::size_t step, int live) {
    std::uint32_t indices[kPacks];
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      indices[u] = u < live ? load<std::uint32_t, 1>(row.at(1) + (i + u * step) * sizeof(std::uint32_t)).values[0] : 0;
    }
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      values[u] = u < live ? load<T, 1>(row.at(2) + indices[u] * sizeof(T)).values[0] : T{};
    }
  }
};

template <class T>
struct SaveAt {
  using Element = T;
  using State = Nothing;
  static constexpr Accesses kAccesses = Accesses::kSingle;
  template <int kWidth>
  static constexpr int kAhead = 4;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t step, int live, State&) const {
    const Sampled<T, 4> now(row, i, step, live);
    SORDINO_UNROLL
    for (int u = 0; u < 4; ++u) {
      if (u < live) store_packed(row.at(0) + (i + u * step) * sizeof(T), now.values[u]);
    }
  }
};

template <class T>
struct CompareAt {
  using Element = T;
  using State = SameCounts;
  static constexpr Accesses kAccesses = Accesses::kSingle;
  template <int kWidth>
  static constexpr int kAhead = 4;

  double scale;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t step, int live, State& counts) const {
    const Sampled<T, 4> now(row, i, step, live);
    SORDINO_UNROLL
    for (int u = 0; u < 4; ++u) {
      if (u >= live) break;
      counts.values[0] += same(now.values[u], load_packed<T>(row.at(0) + (i + u * step) * sizeof(T)), scale);
    }
  }
};

}  // namespace sordino::kernels::cuda
