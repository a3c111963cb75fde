// Comparison of two values after rounding (unchanged.h), on CPUs and GPUs. Included like element.h.
#pragma once

#include "kernels/element.h"

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

template <class Float>
constexpr Float kNoDecimals = sizeof(Float) == sizeof(double) ? Float(0x1p52) : Float(0x1p23);

SORDINO_BOTH inline float magnitude(float value) { return __builtin_fabsf(value); }
SORDINO_BOTH inline double magnitude(double value) { return __builtin_fabs(value); }
SORDINO_BOTH inline float with_sign(float value, float sign) { return __builtin_copysignf(value, sign); }
SORDINO_BOTH inline double with_sign(double value, double sign) { return __builtin_copysign(value, sign); }

// Rounds to the nearest integer by addition: the baseline has no instruction for it. Floats from 2^23 on are integers.
template <class Float>
SORDINO_BOTH inline Float whole(Float value) {
  const Float shift = with_sign(kNoDecimals<Float>, value);
  return (value + shift) - shift;
}

template <class Float>
SORDINO_BOTH inline bool round_alike(Float a, Float b) {
  constexpr Float limit = kNoDecimals<Float>;
  const bool decimals = (magnitude(a) < limit) & (magnitude(b) < limit);
  return decimals & (whole(a) == whole(b));
}

}  // namespace

// The unsigned integer of kBytes bytes.
template <std::size_t kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = std::uint8_t;
};
template <>
struct WordOf<2> {
  using type = std::uint16_t;
};
template <>
struct WordOf<4> {
  using type = std::uint32_t;
};
template <>
struct WordOf<8> {
  using type = std::uint64_t;
};

}  // namespace sordino::kernels::SORDINO_LEVEL
