// Reading, combining, scaling and writing of one element, with the same bits on every CPU level (cpu/) and on GPUs
// (cuda/). Define SORDINO_LEVEL, the namespace of this copy, before including this.
//
// The code is branch-free, or its branches can be removed, because on CPUs compilers vectorize the loops over it. So
// one definition serves every level, with the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/dtype.h"

// Marks functions that GPUs run as well.
#if defined(__CUDACC__)
#define SORDINO_BOTH __host__ __device__
#else
#define SORDINO_BOTH
#endif

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

SORDINO_BOTH inline std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
SORDINO_BOTH inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Selects without a branch: compilers turn chains of ?: into jumps, which they cannot vectorize.
SORDINO_BOTH inline std::uint32_t pick(bool condition, std::uint32_t yes, std::uint32_t no) {
  return no ^ ((yes ^ no) & -static_cast<std::uint32_t>(condition));
}

// Half: the same bits as VCVTPH2PS and VCVTPS2PH, which make NaNs quiet and keep their upper payload bits. Magnitudes
// are compared as signed integers, because SSE2 has only signed comparisons.
SORDINO_BOTH inline float decode(Half half) {
#if defined(__CUDA_ARCH__)
  float value;  // the code below would be slower than the memory of a GPU
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half.bits));
  return value;
#else
  const std::uint32_t bits = half.bits;
  const std::uint32_t magnitude = bits & 0x7fffu;
  const auto order = static_cast<std::int32_t>(magnitude);
  const std::uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  // 0.5 + m * 2^-24 has m in its last bits. No float is subnormal here, so flush-to-zero mode changes nothing.
  const std::uint32_t subnormal = bits_of(float_of((126u << 23) + magnitude) - 0.5f);
  const std::uint32_t infinite = (magnitude << 13) | 0x7f800000u;
  std::uint32_t result = pick(order < 0x0400, subnormal, normal);
  result = pick(order >= 0x7c00, infinite, result);
  result |= pick(order > 0x7c00, 0x00400000u, 0);
  return float_of(result | ((bits & 0x8000u) << 16));
#endif
}

SORDINO_BOTH inline void encode(float value, Half& out) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
#else
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const auto order = static_cast<std::int32_t>(magnitude);
  // To nearest even: adds half a unit minus 1, plus the last kept bit. A carry goes into the exponent, up to infinity.
  const std::uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 shifts the mantissa to units of 2^-24 and lets the FPU round it.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  std::uint32_t result = pick(order < ((127 - 14) << 23), subnormal, normal);
  result = pick(order >= ((127 + 16) << 23), 0x7c00u, result);
  result = pick(order > 0x7f800000, nan, result);
  out.bits = static_cast<std::uint16_t>(result | ((bits >> 16) & 0x8000u));
#endif
}

SORDINO_BOTH inline float decode(BFloat16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

SORDINO_BOTH inline void encode(float value, BFloat16& out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
#else
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Without the quiet bit, a NaN whose payload is in the dropped half would become an infinity.
  const std::uint32_t nan = (bits >> 16) | 0x0040u;
  out.bits = static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
#endif
}

// All other types are computed in the type in which they are stored.
template <class T>
SORDINO_BOTH T decode(T value) {
  return value;
}

// The type in which a fold computes.
template <class T>
using Stage = decltype(decode(T{}));

// Rounds toward zero and saturates. NaN (zero times an infinite scale) becomes 0. As a double, the upper limit of a
// 64-bit type rounds up to 2^63 or 2^64, the first value out of range: hence >=.
template <class T>
SORDINO_BOTH T saturate(double value) {
  constexpr T min = std::numeric_limits<T>::min();
  constexpr T max = std::numeric_limits<T>::max();
  if (!(value > static_cast<double>(min))) return value != value ? T{0} : min;
  if (value >= static_cast<double>(max)) return max;
  return static_cast<T>(value);
}

// Integers wrap. So arithmetic is unsigned, and not in 16 bits, because uint16 would promote to signed int.
template <class T>
using Wrapping = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

// The folds. T is a scalar or, in lanes.h, a vector of floats.
struct Sum {
  template <class T>
  SORDINO_BOTH static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <class T>
  SORDINO_BOTH static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
};

// If a is NaN, a != a selects it. If b is NaN, the comparison is false and selects b.
struct Min {
  template <class T>
  SORDINO_BOTH static T apply(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Max {
  template <class T>
  SORDINO_BOTH static T apply(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
