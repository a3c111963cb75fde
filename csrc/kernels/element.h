// Reading, combining, scaling and writing of one element: on every CPU level (cpu/) and on GPUs (cuda/), with the same
// bits. Define SORDINO_LEVEL, the namespace of a copy, before including this.
//
// Everything here is branch-free or if-convertible, because on CPUs the loops over it are left to the compiler's
// vectoriser: one definition then serves every level, and all levels agree bit for bit.
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

// A selection without a branch: compilers turn chains of ?: into jumps, which they then cannot vectorise.
SORDINO_BOTH inline std::uint32_t pick(bool condition, std::uint32_t yes, std::uint32_t no) {
  return no ^ ((yes ^ no) & -static_cast<std::uint32_t>(condition));
}

// Half: the same bits as VCVTPH2PS and VCVTPS2PH, which quieten NaNs and keep their upper payload bits. Magnitudes are
// signed because SSE2 has only signed comparisons.
SORDINO_BOTH inline float decode(Half half) {
#if defined(__CUDA_ARCH__)
  float value;  // a GPU moves more elements than it could convert bit by bit
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half.bits));
  return value;
#else
  const std::uint32_t bits = half.bits;
  const std::uint32_t magnitude = bits & 0x7fffu;
  const auto order = static_cast<std::int32_t>(magnitude);
  const std::uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  // 0.5 + m * 2^-24 has m in its last bits; no float subnormal arises, so flush-to-zero mode changes nothing.
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
  // Nearest even: half a unit less one, plus the last kept bit; a carry runs into the exponent, and up to infinity.
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
  // A NaN whose payload lies in the dropped half would become infinity without the quiet bit.
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

// Rounds toward zero and saturates; NaN (an infinite scale of zero) becomes 0. The upper bound of 64-bit types rounds
// up to 2^63 or 2^64 as a double, which is the first value out of range: hence >=.
template <class T>
SORDINO_BOTH T saturate(double value) {
  constexpr T min = std::numeric_limits<T>::min();
  constexpr T max = std::numeric_limits<T>::max();
  if (!(value > static_cast<double>(min))) return value != value ? T{0} : min;
  if (value >= static_cast<double>(max)) return max;
  return static_cast<T>(value);
}

// Integers wrap: unsigned arithmetic, at least as wide as unsigned int, because uint16 would promote to signed int.
template <class T>
using Wrapping = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

// The folds. T is a scalar or, in lanes.h, a vector of floats: the same expressions serve both.
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

// a != a keeps a NaN on the left, and a comparison with a NaN on the right is false and takes it.
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
