// The results of the kernels, computed in the slow and obvious way: floats as exact doubles with explicit rounding
// after every operation, integers in 128 bits. Shares no code with csrc/kernels/cpu.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/dtype.h"

namespace sordino::test {

using Wide = __int128;

template <class T>
inline constexpr bool is_float = std::is_floating_point_v<T> || std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

// Rounds to `digits` significant bits, nearest even, with subnormals below 2^min_exponent and infinity from `limit`.
inline double round_to(double x, int digits, int min_exponent, double limit) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), min_exponent);
  const double unit = std::ldexp(1.0, exponent - digits + 1);
  const double rounded = std::nearbyint(x / unit) * unit;
  return std::abs(rounded) >= limit ? std::copysign(INFINITY, x) : rounded;
}

// Convert between a double and the bits of a 16-bit float, by its fields.
inline double small_to_double(std::uint16_t bits, int mantissa_bits, int bias) {
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int top = 0x7fff >> mantissa_bits;
  double value;
  if (exponent == top) {
    value = mantissa ? NAN : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return std::copysign(value, bits & 0x8000 ? -1.0 : 1.0);
}

inline std::uint16_t double_to_small(double x, int mantissa_bits, int bias) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const int top = 0x7fff >> mantissa_bits;
  if (std::isnan(x)) return static_cast<std::uint16_t>(sign | 0x7fff);
  x = round_to(std::abs(x), mantissa_bits + 1, 1 - bias, std::ldexp(1.0, bias + 1));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | (top << mantissa_bits));
  if (x == 0) return sign;
  const int exponent = std::max(std::ilogb(x), 1 - bias);
  const int mantissa = static_cast<int>(std::ldexp(x, mantissa_bits - exponent));
  // The leading bit of a normal number adds one to the exponent field.
  return static_cast<std::uint16_t>(sign | (((exponent + bias - 1) << mantissa_bits) + mantissa));
}

inline double to_double(Half x) { return small_to_double(x.bits, 10, 15); }
inline double to_double(BFloat16 x) { return small_to_double(x.bits, 7, 127); }
inline double to_double(float x) { return x; }
inline double to_double(double x) { return x; }
inline void from_double(double x, Half& out) { out.bits = double_to_small(x, 10, 15); }
inline void from_double(double x, BFloat16& out) { out.bits = double_to_small(x, 7, 127); }
inline void from_double(double x, float& out) { out = static_cast<float>(x); }
inline void from_double(double x, double& out) { out = x; }

// One step in the type in which the fold computes: a double operation on two floats, rounded to float, has the result
// of the float operation.
template <class T>
double staged(double x) {
  return std::is_same_v<T, double> ? x : static_cast<double>(static_cast<float>(x));
}

inline double fold(ReduceOp op, double a, double b) {
  if (op == ReduceOp::kSum) return a + b;
  if (op == ReduceOp::kProduct) return a * b;
  if (std::isnan(a) || std::isnan(b)) return NAN;
  if (op == ReduceOp::kMin) return a < b ? a : b;
  return a > b ? a : b;
}

inline Wide fold(ReduceOp op, Wide a, Wide b) {
  if (op == ReduceOp::kSum) return a + b;
  if (op == ReduceOp::kProduct) return static_cast<Wide>(static_cast<unsigned __int128>(a) * b);
  if (op == ReduceOp::kMin) return a < b ? a : b;
  return a > b ? a : b;
}

template <class T>
T scaled_integer(T x, double factor) {
  if (factor == 1) return x;
  const double product = static_cast<double>(x) * factor;
  if (std::isnan(product)) return 0;
  constexpr long double min = std::numeric_limits<T>::min(), max = std::numeric_limits<T>::max();
  const long double whole = std::trunc(static_cast<long double>(product));
  return static_cast<T>(whole < min ? min : whole > max ? max : whole);
}

// One element of kernels::reduce. `at(k)` is the element of source k.
template <class T, class At>
T reduce_one(ReduceOp op, int sources, At at, double pre, double post) {
  if constexpr (std::is_same_v<T, Bool>) {
    bool any = false, all = true;
    for (int k = 0; k < sources; ++k) {
      any = any || at(k).byte;
      all = all && at(k).byte;
    }
    return Bool{op == ReduceOp::kSum || op == ReduceOp::kMax ? any : all};
  } else if constexpr (is_float<T>) {
    const auto read = [&](int k) { return pre == 1 ? to_double(at(k)) : staged<T>(to_double(at(k)) * staged<T>(pre)); };
    double value = read(0);
    for (int k = 1; k < sources; ++k) value = staged<T>(fold(op, value, read(k)));
    if (post != 1) value = staged<T>(value * staged<T>(post));
    T out;
    from_double(value, out);
    return out;
  } else {
    T value = scaled_integer(at(0), pre);
    for (int k = 1; k < sources; ++k) {
      value = static_cast<T>(fold(op, static_cast<Wide>(value), static_cast<Wide>(scaled_integer(at(k), pre))));
    }
    return scaled_integer(value, post);
  }
}

template <class T>
T axpby_one(T x, T y, double a, double b) {
  const double ax = staged<T>(staged<T>(a) * to_double(x));
  const double by = staged<T>(staged<T>(b) * to_double(y));
  T out;
  from_double(staged<T>(ax + by), out);
  return out;
}

// Whether bits are the same or both are NaN: the kind of NaN is not specified.
template <class T>
bool same(T a, T b) {
  if constexpr (is_float<T>) {
    if (std::isnan(to_double(a)) || std::isnan(to_double(b))) {
      return std::isnan(to_double(a)) && std::isnan(to_double(b));
    }
  }
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

}  // namespace sordino::test
