// Operations that compute sums. Each thread adds up its part of a chunk, the block adds up its threads, and `combine`
// adds up a row's chunks. The order does not depend on addresses: packs are cut from a row's beginning.
#pragma once

#include <cmath>

#include "kernels/cuda/element_ops.h"

namespace sordino::kernels::cuda {

template <class N, int kNumbers>
struct Totals {
  using Number = N;
  static constexpr int kCount = kNumbers;
  Number values[kNumbers] = {};

  SORDINO_BOTH void add(const Totals& other) {
    SORDINO_UNROLL
    for (int j = 0; j < kNumbers; ++j) values[j] += other.values[j];
  }
};

// Sums of products of x and y, as doubles.
struct DotSums : Totals<double, 3> {
  static constexpr int kLists = 2;
  SORDINO_BOTH void take(double x, double y) {
    values[0] += x * x;
    values[1] += x * y;
    values[2] += y * y;
  }
};
struct DistanceSum : Totals<double, 1> {
  static constexpr int kLists = 2;
  SORDINO_BOTH void take(double x, double y) { values[0] += (x - y) * (x - y); }
};
struct SquareSum : Totals<double, 1> {
  static constexpr int kLists = 1;
  SORDINO_BOTH void take(double x, double) { values[0] += x * x; }
};

template <class T, class Sums>
struct SumUp {
  using Element = T;
  using State = Sums;
  static constexpr Accesses kAccesses = Accesses::kFixed;
  template <int kWidth>
  static constexpr int kAhead = kWidth == 1 ? 1 : kInFlight<T, kWidth>;

  std::uint32_t lists = Sums::kLists;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t step, int live, State& sums) const {
    constexpr int kPacks = kAhead<kWidth>;
    const std::size_t at = i * sizeof(T), stride = step * sizeof(T);
    Pack<T, kWidth> x[kPacks], y[kPacks];
    load_some(x, row.words[0] + at, stride, live);
    if constexpr (Sums::kLists > 1) load_some(y, row.words[1] + at, stride, live);
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      if (u >= live) break;
      SORDINO_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        const double first = decode(x[u].values[e]);
        if constexpr (Sums::kLists > 1) sums.take(first, decode(y[u].values[e]));
        if constexpr (Sums::kLists == 1) sums.take(first, first);
      }
    }
  }

 private:
  template <int kWidth, int kPacks>
  SORDINO_BOTH static void load_some(Pack<T, kWidth> (&packs)[kPacks], std::uint64_t address, std::size_t stride,
                                     int live) {
    const auto* from = reinterpret_cast<const std::byte*>(address);
    if (address % sizeof(Pack<T, kWidth>) == 0) {
      load_live(packs, from, stride, live);
    } else {
      SORDINO_UNROLL
      for (int u = 0; u < kPacks; ++u) {
        packs[u] = u < live ? load_each<T, kWidth>(from + u * stride) : Pack<T, kWidth>{};
      }
    }
  }
};

// Returns the part of the sum over a row's chunks that thread `thread` of `threads` computes.
template <class Sums, class AnyBatch>
SORDINO_BOTH inline Sums combine(const AnyBatch& batch, std::uint32_t row, const Sums* chunks, std::uint32_t thread,
                                 std::uint32_t threads) {
  Sums sums;
  const std::uint64_t end = batch.chunks_up_to(row);
  for (std::uint64_t chunk = batch.chunks_before(row) + thread; chunk < end; chunk += threads) sums.add(chunks[chunk]);
  return sums;
}

// Stores a row's results: the sums themselves, or a norm.
template <class Sums>
struct StoreSums {
  double* results;
  SORDINO_BOTH void operator()(const Row& row, const Sums& sums) const {
    for (int j = 0; j < Sums::kCount; ++j) results[row.index * Sums::kCount + j] = sums.values[j];
  }
};
struct StoreNorm {
  double* results;
  SORDINO_BOTH void operator()(const Row& row, const SquareSum& sums) const {
    results[row.index] = sqrt(sums.values[0]);
  }
};

}  // namespace sordino::kernels::cuda
