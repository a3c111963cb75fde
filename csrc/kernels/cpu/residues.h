// Modulo codes of one block (modulo.h). Included by impl.h only. Codes are packed in planes, as in codes.h.
#pragma once

#include "kernels/cpu/coding.h"
#include "kernels/cpu/table.h"

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

constexpr std::uint32_t kMostNumber = 0x4a800000;  // 2^22: nearest() is exact up to this magnitude
constexpr std::uint32_t kTooLarge = 0x7e800000;    // 2^126: differences of smaller values are finite
constexpr int kFinestBits = 20;                    // a step is at least 2^-20 * 2^floor(log2(largest value))

// Returns the nearest integer, limited to [-2^22, 2^22].
inline std::int32_t nearest(float value) {
  const std::uint32_t bits = bits_of(value), magnitude = bits & kMagnitude;
  const std::uint32_t within = magnitude < kMostNumber ? magnitude : kMostNumber;  // as integers, for vectorization
  const float limited = float_of(within | (bits & ~kMagnitude));
  return static_cast<std::int32_t>(bits_of(limited + 12582912.0F) - bits_of(12582912.0F));  // 1.5 * 2^23
}

// Returns the term of one number in the checksum, which is the sum of the terms of a block. A wrongly decoded number
// differs by a multiple of 2^bits, and its term looks unrelated. So errors do not cancel each other.
inline std::uint32_t scattered(std::int32_t number, std::uint32_t place) {
  std::uint32_t x = static_cast<std::uint32_t>(number) + place * 0x9e3779b1U;
  x *= 0x85ebca77U;
  x ^= x >> 15;
  x *= 0xc2b2ae3dU;
  return x;
}

// Returns the bits of the step, rounded up to 2 bits of mantissa. `largest`: bits of the block's largest magnitude.
template <int kBits>
std::uint32_t step_for(float distance, std::uint32_t largest) {
  constexpr std::uint32_t kRest = (1U << kStepShift) - 1, kExponent = 0x7f800000, kFinest = kFinestBits << 23;
  const std::uint32_t window = (bits_of(margin_of(kBits) * distance / reach_of(kBits)) + kRest) & ~kRest;
  const std::uint32_t power = largest & kExponent, fine = power > kFinest ? power - kFinest : 0;
  const std::uint32_t step = window > fine ? window : fine;
  return step < kLeastStep ? kLeastStep : step > kMostStep ? kMostStep : step;
}

// Returns `values` if there are `block` of them. Else fills `padded` with them and zeros, and returns it.
inline const float* whole_block(const float* values, std::size_t count, std::size_t block, float* padded) {
  if (count == block) return values;
  __builtin_memcpy(padded, values, count * sizeof(float));
  __builtin_memset(padded + count, 0, (block - count) * sizeof(float));
  return padded;
}

template <int kBits>
bool encode_residues(const ResidueEncoding& e) {
  constexpr std::size_t kCount = 8 / kBits;  // planes
  constexpr std::uint32_t kMask = (1U << kBits) - 1;
  const std::size_t plane = e.block / kCount;
  auto* out = reinterpret_cast<std::uint8_t*>(e.encoded + sizeof(std::uint32_t));
  const std::uint32_t largest = largest_magnitude(e.values, e.count);
  if (largest >= kTooLarge) {
    __builtin_memcpy(e.encoded, &kNotFinite, sizeof kNotFinite);
    __builtin_memset(out, 0, plane);
    return false;
  }
  float padded[kMostCoded];
  const float* values = whole_block(e.values, e.count, e.block, padded);
  const std::uint32_t step = step_for<kBits>(e.distance, largest);
  const float factor = 1 / float_of(step);
  std::int32_t numbers[kMostCoded];
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < e.block; ++i) {
    numbers[i] = nearest(values[i] * factor);
    sum += scattered(numbers[i], static_cast<std::uint32_t>(i));
  }
  SORDINO_INDEPENDENT
  for (std::size_t j = 0; j < plane; ++j) {
    std::uint32_t byte = 0;
    for (std::size_t k = 0; k < kCount; ++k) {
      byte |= (static_cast<std::uint32_t>(numbers[j + k * plane]) & kMask) << (k * kBits);
    }
    out[j] = static_cast<std::uint8_t>(byte);
  }
  const std::uint32_t header = (sum & ~kStepMask) | step >> kStepShift;
  __builtin_memcpy(e.encoded, &header, sizeof header);
  return true;
}

template <int kBits>
bool add_residues(const ResidueDecoding& d) {
  constexpr std::size_t kCount = 8 / kBits;
  constexpr std::uint32_t kMask = (1U << kBits) - 1;
  const std::size_t plane = d.block / kCount;
  const auto* in = reinterpret_cast<const std::uint8_t*>(d.encoded + sizeof(std::uint32_t));
  const std::uint32_t header = header_of(d.encoded);
  float padded[kMostCoded];
  const float* values = whole_block(d.values, d.count, d.block, padded);
  const float step = float_of(step_bits(header)), factor = 1 / step;
  std::int32_t numbers[kMostCoded];
  std::uint32_t sum = 0;
  for (std::size_t k = 0; k < kCount; ++k) {
    const std::size_t first = k * plane;
    for (std::size_t j = 0; j < plane; ++j) {
      const std::int32_t here = nearest(values[first + j] * factor);
      const std::uint32_t code = static_cast<std::uint32_t>(in[j]) >> (k * kBits) & kMask;
      const std::uint32_t ahead = (code - static_cast<std::uint32_t>(here)) << (32 - kBits);
      numbers[first + j] = here + (static_cast<std::int32_t>(ahead) >> (32 - kBits));  // nearest to here with this code
      sum += scattered(numbers[first + j], static_cast<std::uint32_t>(first + j));
    }
  }
  if (((sum ^ header) & ~kStepMask) != 0) return false;
  const float own_step = float_of(step_bits(header_of(d.own))), own_factor = 1 / own_step;
  std::uint32_t farthest = 0;
  for (std::size_t i = 0; i < d.count; ++i) {
    const float theirs = step * static_cast<float>(numbers[i]);
    const float mine = own_step * static_cast<float>(nearest(values[i] * own_factor));
    d.change[i] += d.weight * (theirs - mine);
    const std::uint32_t distance = bits_of(theirs - values[i]) & kMagnitude;
    farthest = distance > farthest ? distance : farthest;
  }
  *d.distance = float_of(farthest);
  return true;
}

constexpr void enter_residues(Table& table) {
  table.encode_residues[residue_index(4)] = encode_residues<4>;
  table.encode_residues[residue_index(8)] = encode_residues<8>;
  table.add_residues[residue_index(4)] = add_residues<4>;
  table.add_residues[residue_index(8)] = add_residues<8>;
  table.largest = largest_magnitude;
}

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
