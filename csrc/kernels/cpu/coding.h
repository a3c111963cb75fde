// Encoding and decoding of one block (codecs.h). Included by impl.h only.
//
// The loops read and write adjacent elements, so that compilers vectorize them.
#pragma once

#include "kernels/codes.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/table.h"

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

constexpr std::size_t kMostCoded = 16384;  // values of a block

inline std::uint32_t largest_magnitude(const float* values, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(values[i]) & kMagnitude;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Adds the upper half of the lanes to the lower half, until one is left.
template <class Number>
inline Number sum_of_lanes(Number (&lanes)[kSumLanes]) {
  for (std::size_t half = kSumLanes / 2; half > 0; half /= 2) {
    for (std::size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

template <Code kCode>
float sum_of_summands(const float* values, std::size_t count, float factor) {
  float lanes[kSumLanes] = {};
  std::size_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    for (std::size_t k = 0; k < kSumLanes; ++k) lanes[k] += summand<kCode>(values[i + k], factor);
  }
  for (std::size_t k = 0; i < count; ++i, ++k) lanes[k] += summand<kCode>(values[i], factor);
  return sum_of_lanes(lanes);
}

template <Code kCode>
bool encode_all(const Encoding& e) {
  constexpr std::size_t kCount = kPlanes<kCode>;
  constexpr std::uint32_t kBits = 8 / kCount;
  const BlockScale found = block_scale<kCode>(largest_magnitude(e.values, e.count), e.count, [&](float factor) {
    return sum_of_summands<kCode>(e.values, e.count, factor);
  });
  __builtin_memcpy(e.encoded, &found.scale, sizeof(float));
  auto* out = reinterpret_cast<std::uint8_t*>(e.encoded + sizeof(float));
  const std::size_t plane = e.block / kCount;
  if (!found.finite) {
    __builtin_memset(out, 0, plane);
    return false;
  }
  float padded[kMostCoded];
  const float* values = e.values;
  if (e.count < e.block) {
    __builtin_memcpy(padded, e.values, e.count * sizeof(float));
    __builtin_memset(padded + e.count, 0, (e.block - e.count) * sizeof(float));
    values = padded;
  }
  const float factor = found.factor;
  SORDINO_INDEPENDENT
  for (std::size_t j = 0; j < plane; ++j) {
    std::uint32_t byte = 0;
    for (std::size_t k = 0; k < kCount; ++k) {
      byte |= code_of<kCode>(values[j + k * plane], factor) << (k * kBits);
    }
    out[j] = static_cast<std::uint8_t>(byte);
  }
  return true;
}

// Compilers unroll a loop of unknown length for 32 values and more, and handle the rest one by one. So a plane of this
// many values (that of a Sign's usual block) has a loop of its own.
constexpr std::size_t kShortPlane = 16;

template <Code kCode, bool kAdd>
void decode_planes(const std::uint8_t* in, std::size_t block, float scale, float weight, float* values) {
  constexpr std::size_t kCount = kPlanes<kCode>;
  constexpr std::uint32_t kBits = 8 / kCount, kMask = (1U << kBits) - 1;
  const std::size_t plane = block / kCount;
  for (std::size_t k = 0; k < kCount; ++k) {
    float* out = values + k * plane;
    const auto decode = [&](std::size_t j) {
      const std::uint32_t code = static_cast<std::uint32_t>(in[j]) >> (k * kBits) & kMask;
      const float value = weight * value_of<kCode>(code, scale);
      out[j] = kAdd ? out[j] + value : value;
    };
    if (plane == kShortPlane) {
      SORDINO_INDEPENDENT
      for (std::size_t j = 0; j < kShortPlane; ++j) decode(j);
    } else {
      SORDINO_INDEPENDENT
      for (std::size_t j = 0; j < plane; ++j) decode(j);
    }
  }
}

template <Code kCode>
bool decode_all(const Decoding& d) {
  float scale;
  __builtin_memcpy(&scale, d.encoded, sizeof scale);
  const auto* in = reinterpret_cast<const std::uint8_t*>(d.encoded + sizeof(float));
  float padded[kMostCoded];
  const bool whole = d.count == d.block;
  float* values = whole ? d.values : padded;
  if (!whole && d.add) {
    __builtin_memcpy(padded, d.values, d.count * sizeof(float));
    __builtin_memset(padded + d.count, 0, (d.block - d.count) * sizeof(float));
  }
  if (d.add) {
    decode_planes<kCode, true>(in, d.block, scale, d.weight, values);
  } else {
    decode_planes<kCode, false>(in, d.block, scale, d.weight, values);
  }
  if (!whole) __builtin_memcpy(d.values, padded, d.count * sizeof(float));
  if (d.given != nullptr) {
    for (std::size_t i = 0; i < d.count; ++i) d.given[i] += 1;
  }
  return true;
}

// ---- the largest of a block -----------------------------------------------------------------------------------------

// Writes numbers with any number of bits each, without gaps.
class BitWriter {
 public:
  explicit BitWriter(std::byte* out) : out_(reinterpret_cast<std::uint8_t*>(out)) {}
  void put(std::uint32_t value, std::uint32_t bits) {
    held_ |= static_cast<std::uint64_t>(value) << count_;
    for (count_ += bits; count_ >= 8; count_ -= 8, held_ >>= 8) *out_++ = static_cast<std::uint8_t>(held_);
  }
  void finish() {
    if (count_ > 0) *out_ = static_cast<std::uint8_t>(held_);
  }

 private:
  std::uint8_t* out_;
  std::uint64_t held_ = 0;
  std::uint32_t count_ = 0;
};

class BitReader {
 public:
  explicit BitReader(const std::byte* in) : in_(reinterpret_cast<const std::uint8_t*>(in)) {}
  std::uint32_t take(std::uint32_t bits) {
    for (; count_ < bits; count_ += 8) held_ |= static_cast<std::uint64_t>(*in_++) << count_;
    const auto value = static_cast<std::uint32_t>(held_ & ((std::uint64_t{1} << bits) - 1));
    held_ >>= bits;
    count_ -= bits;
    return value;
  }

 private:
  const std::uint8_t* in_;
  std::uint64_t held_ = 0;
  std::uint32_t count_ = 0;
};

inline std::size_t count_from(const std::uint32_t* magnitudes, std::size_t count, std::uint32_t least) {
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found += magnitudes[i] >= least;
  return found;
}

// Bits of a magnitude that at least `kept` values reach, but few others: the largest divided by 2, 4, 16, ..., or 0.
inline std::uint32_t low_bar(const std::uint32_t* magnitudes, std::size_t count, std::size_t kept) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = magnitudes[i] > largest ? magnitudes[i] : largest;
  constexpr std::uint32_t kHalf = 1U << 23;  // subtracted from the bits, it halves the magnitude
  for (std::uint32_t step = kHalf; step < largest; step *= 2) {
    if (count_from(magnitudes, count, largest - step) >= kept) return largest - step;
  }
  return 0;
}

// Finds the positions of the `kept` largest magnitudes, in rising order; of equal ones, the first. From a low bar on,
// it finds the smallest kept magnitude bit by bit: floats without their sign have the order of their bits.
inline void find_largest(const float* values, std::size_t count, std::size_t kept, std::uint16_t* positions) {
  std::uint32_t magnitudes[kMostCoded];
  for (std::size_t i = 0; i < count; ++i) magnitudes[i] = bits_of(values[i]) & kMagnitude;
  const std::uint32_t bar = low_bar(magnitudes, count, kept);
  std::uint16_t places[kMostCoded];
  std::size_t high = 0;
  for (std::size_t i = 0; i < count; ++i) {
    places[high] = static_cast<std::uint16_t>(i);
    high += magnitudes[i] >= bar;
  }
  for (std::size_t k = 0; k < high; ++k) magnitudes[k] = magnitudes[places[k]];
  std::uint32_t least = 0;
  for (std::uint32_t bit = 1U << 30; bit != 0; bit >>= 1) {
    if (count_from(magnitudes, high, least | bit) >= kept) least |= bit;
  }
  std::size_t equal = kept - count_from(magnitudes, high, least + 1);  // number of kept values that equal `least`
  std::size_t taken = 0;
  for (std::size_t k = 0; k < high && taken < kept; ++k) {
    if (magnitudes[k] < least) continue;
    if (magnitudes[k] == least) {
      if (equal == 0) continue;
      --equal;
    }
    positions[taken++] = places[k];
  }
}

template <bool kExact>
bool encode_top(const Encoding& e) {
  const std::size_t kept = e.kept < e.count ? e.kept : e.count;
  const std::uint32_t width = index_bits(e.block);
  std::uint16_t positions[kMostCoded];
  find_largest(e.values, e.count, kept, positions);
  bool finite = true;
  for (std::size_t k = 0; k < kept; ++k) finite &= (bits_of(e.values[positions[k]]) & kMagnitude) < kInfinity;
  if constexpr (kExact) {
    BitWriter out(e.encoded);
    for (std::size_t k = 0; k < kept; ++k) {
      out.put(positions[k], width);
      out.put(bits_of(e.values[positions[k]]), 32);
    }
    out.finish();
    return finite;
  }
  const auto magnitude = [&](std::size_t k) { return float_of(bits_of(e.values[positions[k]]) & kMagnitude); };
  double sums[kSumLanes] = {}, upper[kSumLanes] = {}, lower[kSumLanes] = {};
  for (std::size_t k = 0; k < kept; ++k) sums[k % kSumLanes] += static_cast<double>(magnitude(k));
  const float mean = level_of(sum_of_lanes(sums), static_cast<std::uint32_t>(kept));
  std::uint32_t above = 0;
  for (std::size_t k = 0; k < kept; ++k) {
    const float value = magnitude(k);
    above += value > mean;
    double* const level = value > mean ? upper : lower;
    level[k % kSumLanes] += static_cast<double>(value);
  }
  float levels[2] = {level_of(sum_of_lanes(lower), static_cast<std::uint32_t>(kept) - above),
                     level_of(sum_of_lanes(upper), above)};
  if (!finite) levels[0] = levels[1] = float_of(kNan);
  __builtin_memcpy(e.encoded, levels, sizeof levels);
  BitWriter out(e.encoded + sizeof levels);
  for (std::size_t k = 0; k < kept; ++k) {
    out.put(positions[k], width);
    out.put(kept_code(e.values[positions[k]], mean), 2);
  }
  out.finish();
  return finite;
}

template <bool kExact>
bool decode_top(const Decoding& d) {
  const std::size_t kept = d.kept < d.count ? d.kept : d.count;
  const std::uint32_t width = index_bits(d.block);
  float levels[2] = {};
  if constexpr (!kExact) __builtin_memcpy(levels, d.encoded, sizeof levels);
  BitReader in(d.encoded + (kExact ? 0 : sizeof levels));
  if (!d.add) __builtin_memset(d.values, 0, d.count * sizeof(float));
  bool inside = true;
  for (std::size_t k = 0; k < kept; ++k) {
    const std::uint32_t position = in.take(width);
    float value;
    if constexpr (kExact) {
      value = float_of(in.take(32));
    } else {
      value = kept_value(in.take(2), levels[0], levels[1]);
    }
    if (position >= d.count) {
      inside = false;
      continue;
    }
    d.values[position] += d.weight * value;
    if (d.given != nullptr) d.given[position] += 1;
  }
  return inside;
}

template <Code kCode>
constexpr void enter_code(Table& table) {
  table.encode[static_cast<int>(kCode)] = encode_all<kCode>;
  table.decode[static_cast<int>(kCode)] = decode_all<kCode>;
}

constexpr void enter_codes(Table& table) {
  enter_code<Code::kInt8>(table);
  enter_code<Code::kInt4>(table);
  enter_code<Code::kTwoBit>(table);
  enter_code<Code::kSign>(table);
  table.encode[static_cast<int>(Code::kTop)] = encode_top<false>;
  table.decode[static_cast<int>(Code::kTop)] = decode_top<false>;
  table.encode[static_cast<int>(Code::kTopExact)] = encode_top<true>;
  table.decode[static_cast<int>(Code::kTopExact)] = decode_top<true>;
}

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
