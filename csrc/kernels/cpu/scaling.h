// Integers times a factor: as saturate() of the product in double (element.h), but faster. Included by impl.h only.
#pragma once

#include "kernels/cpu/lanes.h"

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

// Compiles to one instruction at every level.
inline std::uint16_t upper_half_of_product(std::uint16_t a, std::uint16_t b) {
  return static_cast<std::uint16_t>((static_cast<std::uint32_t>(a) * b) >> 16);
}

// A factor in fixed point: its magnitude times 2^16 for 8-bit integers, or times 2^32 for 16-bit integers and factors
// below 1. GCC 12 uses the instruction above only if the halves have 16 bits.
struct FixedPoint {
  std::uint16_t high, low;
  std::uint16_t negative;  // all ones, or 0 (always for unsigned integers)
};

// This loop and the next two are not inlined: in every fold, they would be most of the code of a level.
template <class T>
[[gnu::noinline]] void scale_fixed(const Loose<T>* in, Loose<T>* out, std::size_t count, FixedPoint factor) {
  using Word = std::conditional_t<std::is_signed_v<T>, std::int16_t, std::uint16_t>;
  const std::uint16_t high = factor.high, low = factor.low, negative = factor.negative;
  SORDINO_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    const Word x = in[i].value;
    const auto sign = static_cast<std::uint16_t>(std::is_signed_v<T> ? x >> 15 : 0);
    const auto minus = static_cast<std::uint16_t>(std::is_signed_v<T> ? sign ^ negative : 0);
    const auto magnitude = static_cast<std::uint16_t>((x ^ sign) - sign);
    const auto times_high = static_cast<std::uint16_t>(static_cast<std::uint32_t>(magnitude) * high);
    const std::uint16_t times_low = upper_half_of_product(magnitude, low);
    const auto sum = static_cast<std::uint16_t>(times_high + times_low);
    std::uint16_t result;
    if constexpr (sizeof(T) == 1) {
      const auto limit = static_cast<std::uint16_t>(std::numeric_limits<T>::max() - minus);  // 1 more if negative
      result = sum < limit ? sum : limit;
    } else {
      const bool carry = sum < times_high;
      result = static_cast<std::uint16_t>(upper_half_of_product(magnitude, high) + carry);
    }
    out[i].value = static_cast<T>((result ^ minus) - minus);
  }
}

// For types of up to 32 bits: their limits are doubles, and values between the limits convert without overflow.
template <class T>
[[gnu::noinline]] void scale_bounded(const Loose<T>* in, Loose<T>* out, std::size_t count, double factor) {
  using Int = std::conditional_t<sizeof(T) < sizeof(std::int32_t), std::int32_t, T>;
  // Read at run time: GCC 12 turns known limits into masks, which take twice as long as minimum and maximum.
  const volatile double limits[] = {std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
  const double min = limits[0], max = limits[1];
  SORDINO_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    double product = static_cast<double>(in[i].value) * factor;
    product = product < min ? min : product;
    product = product < max ? product : max;
    out[i].value = static_cast<T>(static_cast<Int>(product));
  }
}

template <class T>
[[gnu::noinline]] void scale_saturated(const Loose<T>* in, Loose<T>* out, std::size_t count, double factor) {
  SORDINO_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    out[i].value = saturate<T>(static_cast<double>(in[i].value) * factor);
  }
}

// Multiplication of integers by a factor. `count`: number of integers in all calls of apply().
template <class T>
class Scaling {
 public:
  Scaling(double factor, std::size_t count) : factor_(bounded(factor)) {
    if constexpr (sizeof(T) <= 2) {
      // Only for many integers, because choose_fixed() tries all values of T.
      if (factor_ != 1 && count / 4 >= kValues) choose_fixed();
    }
  }

  // Scales to `out`, which may be `in`, and returns it; if the factor is 1, returns `in`.
  const Loose<T>* apply(const Loose<T>* in, Loose<T>* out, std::size_t count) const {
    if (factor_ == 1) return in;
    for (std::size_t i = 0; i < count; i += kLine / sizeof(T)) prefetch(in + i);
    if constexpr (sizeof(T) <= 2) {
      if (is_fixed_) {
        scale_fixed(in, out, count, fixed_);
        return out;
      }
    }
    if constexpr (sizeof(T) <= 4) scale_bounded(in, out, count, factor_);
    if constexpr (sizeof(T) == 8) scale_saturated(in, out, count, factor_);
    return out;
  }

 private:
  static constexpr std::size_t kValues = std::size_t{1} << (sizeof(T) <= 2 ? 8 * sizeof(T) : 0);

  // A finite factor with the same results. NaN turns all integers into 0; a factor of 2^bits or more turns all but 0
  // into a limit; a negative one turns unsigned integers into 0.
  static double bounded(double factor) {
    constexpr double kMax = 2.0 * static_cast<double>(std::uint64_t{1} << (8 * sizeof(T) - 1));
    constexpr double kMin = std::is_signed_v<T> ? -kMax : 0;
    if (factor != factor) return 0;
    return factor < kMin ? kMin : factor > kMax ? kMax : factor;
  }

  // Tries all values of T: fixed point is used only if it is exact for each. With b bits, the factors that give the
  // same results are an interval between two fractions with denominators below 2^b. These are more than 4^-b apart, so
  // a multiple of 4^-b lies between them: the next one below or above the factor. The exceptions are factors just below
  // a fraction, for which some products round up to an integer in double while others do not.
  void choose_fixed() {
    const double magnitude = factor_ < 0 ? -factor_ : factor_;
    if (sizeof(T) == 2 && magnitude >= 1) return;
    const auto multiple = static_cast<std::uint32_t>(magnitude * static_cast<double>(kValues * kValues));
    is_fixed_ = try_fixed(multiple) || try_fixed(multiple + 1);
  }

  bool try_fixed(std::uint32_t multiple) {
    fixed_.high = static_cast<std::uint16_t>(multiple >> 16);
    fixed_.low = static_cast<std::uint16_t>(multiple);
    fixed_.negative = factor_ < 0 ? 0xffff : 0;
    constexpr std::size_t kBatch = 256;
    Loose<T> values[kBatch], exact[kBatch], tried[kBatch];
    for (std::size_t begin = 0; begin < kValues; begin += kBatch) {
      for (std::size_t i = 0; i < kBatch; ++i) values[i].value = static_cast<T>(begin + i);
      scale_bounded(values, exact, kBatch, factor_);
      scale_fixed(values, tried, kBatch, fixed_);
      if (__builtin_memcmp(exact, tried, sizeof exact) != 0) return false;
    }
    return true;
  }

  double factor_;
  FixedPoint fixed_ = {};
  bool is_fixed_ = false;
};

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
