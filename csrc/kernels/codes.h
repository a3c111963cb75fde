// Formulas of the codecs (codecs.h) on CPUs and GPUs: scales of blocks, codes of values, and values of codes. Define
// SORDINO_LEVEL before including this, as for element.h.
//
// Codes of fewer than 8 bits are packed in planes: with 4 bits, byte j holds the values j and j + block / 2; with 2
// bits j, j + block / 4, and so on. So neighboring lanes, of a CPU or a GPU, read and write neighboring elements.
//
// Sums have the same order everywhere: lane k of kSumLanes adds up the elements k, k + kSumLanes, k + 2 * kSumLanes and
// so on. Then the upper half of the lanes is added to the lower half, until one lane is left.
#pragma once

#include "kernels/codecs.h"
#include "kernels/element.h"

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffff;  // all bits of a float but the sign
constexpr std::uint32_t kInfinity = 0x7f800000;
constexpr std::uint32_t kTiny = 0x0d800000;  // 2^-100
constexpr std::uint32_t kNan = 0x7fc00000;
// Magnitudes of a four-level code for a standard normal distribution, and their boundary (Max 1960, Table I).
constexpr float kLower = 0.4528F, kUpper = 1.510F, kBoundary = 0.9816F;
// Limits of a scale, below the largest float, so that no finite value decodes to an infinity.
constexpr std::uint32_t kLargest = 0x7f7ffff0;
constexpr float kLargestRoot = 2.25e38F;

constexpr std::uint32_t kSumLanes = 32;

// Number of planes, which is the number of values in a byte.
template <Code kCode>
constexpr std::uint32_t kPlanes = kCode == Code::kInt8     ? 1
                                  : kCode == Code::kInt4   ? 2
                                  : kCode == Code::kTwoBit ? 4
                                                           : 8;

SORDINO_BOTH inline float square_root(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

// One term of a block's sum.
template <Code kCode>
SORDINO_BOTH inline float summand(float value, float factor) {
  const float x = value * factor;
  return kCode == Code::kTwoBit ? x * x : float_of(bits_of(x) & kMagnitude);
}

// Scale of a block. A code is a function of value * factor. All codes of a block that is not finite are 0.
struct BlockScale {
  float scale, factor;
  bool finite;
};

// `largest`: bits of the largest magnitude of `count` values. sum(factor) returns the sum of summand(value, factor).
template <Code kCode, class TakeSum>
SORDINO_BOTH inline BlockScale block_scale(std::uint32_t largest, std::size_t count, const TakeSum& sum) {
  if (largest >= kInfinity) return {float_of(kNan), 0, false};
  if (largest < kTiny) return {0, 0, true};
  const float most = float_of(largest < kLargest ? largest : kLargest);
  if constexpr (kCode == Code::kInt8) {
    return {most / 127, 127 / most, true};
  } else if constexpr (kCode == Code::kInt4) {
    return {most / 7, 7 / most, true};
  } else {
    // Relative to the largest magnitude, so that squares neither overflow nor underflow.
    const float mean = sum(1 / most) / static_cast<float>(count);
    if constexpr (kCode == Code::kTwoBit) {
      const float root = most * square_root(mean);
      return {root < kLargestRoot ? root : kLargestRoot, 1 / root, true};
    } else {
      return {most * mean, 1, true};
    }
  }
}

// Code of one value, in the low bits.
template <Code kCode>
SORDINO_BOTH inline std::uint32_t code_of(float value, float factor) {
  if constexpr (kCode == Code::kSign) {
    return bits_of(value) >> 31;
  } else {
    const float x = value * factor;
    if constexpr (kCode == Code::kTwoBit) {
      return (bits_of(x) >> 31) << 1 | static_cast<std::uint32_t>(float_of(bits_of(x) & kMagnitude) > kBoundary);
    } else {
      // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
      return bits_of(x + 12582912.0F) & (kCode == Code::kInt8 ? 0xff : 0xf);
    }
  }
}

template <Code kCode>
SORDINO_BOTH inline float value_of(std::uint32_t code, float scale) {
  if constexpr (kCode == Code::kSign) {
    return float_of(bits_of(scale) | code << 31);
  } else if constexpr (kCode == Code::kTwoBit) {
    return float_of(bits_of(scale * (code & 1 ? kUpper : kLower)) | (code >> 1) << 31);
  } else {
    constexpr int kSignBit = kCode == Code::kInt8 ? 0x80 : 0x8;
    return scale * static_cast<float>((static_cast<int>(code) ^ kSignBit) - kSignBit);
  }
}

// Level of kTop: the mean of `count` magnitudes; 0 for none.
SORDINO_BOTH inline float level_of(double sum, std::uint32_t count) {
  return count > 0 ? static_cast<float>(sum / static_cast<double>(count)) : 0;
}

// Code of one kept value of kTop: its sign, and whether its magnitude is above the mean.
SORDINO_BOTH inline std::uint32_t kept_code(float value, float mean) {
  const std::uint32_t bits = bits_of(value);
  return (bits >> 31) << 1 | static_cast<std::uint32_t>(float_of(bits & kMagnitude) > mean);
}
SORDINO_BOTH inline float kept_value(std::uint32_t code, float lower, float upper) {
  return float_of(bits_of(code & 1 ? upper : lower) | (code >> 1) << 31);
}

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
