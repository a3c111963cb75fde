// Dot products and squared distance of two vectors. Included by impl.h only.
#pragma once

#include "kernels/cpu/lanes.h"
#include "kernels/kernels.h"

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

// Number of partial sums, the same at every level (table.h): the order of additions is part of the result. Element i is
// added to sum i modulo 8. No vector is wider than the registers, because GCC would keep it in memory.
constexpr std::size_t kLanes = 8;
#if defined(__AVX2__)
using Doubles = __m256d;
inline Doubles to_doubles(const Loose<float>* p) { return _mm256_cvtps_pd(load_as<__m128>(p)); }
#else
using Doubles = double __attribute__((vector_size(16)));
inline Doubles to_doubles(const Loose<float>* p) {
  using TwoFloats = float __attribute__((vector_size(8)));
  return __builtin_convertvector(load_as<TwoFloats>(p), Doubles);
}
#endif
inline Doubles to_doubles(const Loose<double>* p) { return load_as<Doubles>(p); }
constexpr std::size_t kWidth = sizeof(Doubles) / sizeof(double);
constexpr std::size_t kVectors = kLanes / kWidth;

struct LaneDots {
  Doubles xx[kVectors], xy[kVectors], yy[kVectors];
  void add(std::size_t v, Doubles x, Doubles y) {
    xx[v] += x * x;
    xy[v] += x * y;
    yy[v] += y * y;
  }
};

// Not computed as xx - 2 * xy + yy: for vectors close to each other, only rounding errors would remain.
struct LaneSquares {
  Doubles differences[kVectors];
  void add(std::size_t v, Doubles x, Doubles y) { differences[v] += (x - y) * (x - y); }
};

template <class Sums, class T>
inline void add_lanes(Sums& sums, const Loose<T>* x, const Loose<T>* y) {
  prefetch(x);
  prefetch(y);
  for (std::size_t v = 0; v < kVectors; ++v) sums.add(v, to_doubles(x + v * kWidth), to_doubles(y + v * kWidth));
}

template <class Sums, class T>
void add_all(Sums& result, const Loose<T>* x, const Loose<T>* y, std::size_t count) {
  Sums sums = result;
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) add_lanes(sums, x + i, y + i);
  if (i < count) {
    // Zeros change no sum: a sum that starts at +0 is never -0.
    Loose<T> tail_x[kLanes] = {}, tail_y[kLanes] = {};
    __builtin_memcpy(tail_x, x + i, (count - i) * sizeof(T));
    __builtin_memcpy(tail_y, y + i, (count - i) * sizeof(T));
    add_lanes(sums, tail_x, tail_y);
  }
  result = sums;
}

inline double total(const Doubles (&sums)[kVectors]) {
  double v[kLanes];
  __builtin_memcpy(v, sums, sizeof v);
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

template <class T, class Sums>
Sums sums_of(const std::byte* x, const std::byte* y, std::size_t count) {
  Sums sums = {};
  if constexpr (std::is_floating_point_v<T>) {
    add_all(sums, loose<T>(x), loose<T>(y), count);
  } else {
    constexpr std::size_t kBlock = 1024;
    static_assert(kBlock % kLanes == 0, "a block must end where the lanes begin again");
    Loose<float> fx[kBlock], fy[kBlock];
    for (std::size_t begin = 0; begin < count; begin += kBlock) {
      const std::size_t n = count - begin < kBlock ? count - begin : kBlock;
      const Loose<T>*from_x = loose<T>(x) + begin, *from_y = loose<T>(y) + begin;
      for_lanes<T>(n, [&](auto lane, std::size_t i) {
        lane.store(fx + i, lane.load(from_x + i));
        lane.store(fy + i, lane.load(from_y + i));
      });
      add_all(sums, fx, fy, n);
    }
  }
  return sums;
}

template <class T>
Dots dots(const std::byte* x, const std::byte* y, std::size_t count) {
  const auto sums = sums_of<T, LaneDots>(x, y, count);
  return Dots{total(sums.xx), total(sums.xy), total(sums.yy)};
}

template <class T>
double squared_distance(const std::byte* x, const std::byte* y, std::size_t count) {
  return total(sums_of<T, LaneSquares>(x, y, count).differences);
}

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
