// Modulo codes: checks, sizes, estimates, and the loop over blocks. The level in use encodes and adds each block
// (residues.h).
#include "kernels/modulo.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "base/error.h"
#include "kernels/codecs.h"
#include "kernels/cpu/table.h"

namespace sordino::kernels {
namespace {

bool is_valid(std::uint32_t header) {
  return header == kNotFinite || (step_bits(header) >= kLeastStep && step_bits(header) <= kMostStep);
}

}  // namespace

ModuloCodec::ModuloCodec(int bits, std::size_t block) : bits_(bits), block_(block) {
  if (bits != 4 && bits != 8)
    throw UsageError("a modulo code has " + std::to_string(bits) + " bits, and must have 4 or 8");
  if (block < Codec::kLeastBlock || block > Codec::kMostBlock || !std::has_single_bit(block))
    throw UsageError("a codec's block is " + std::to_string(block) + ", and must be a power of two from " +
                     std::to_string(Codec::kLeastBlock) + " to " + std::to_string(Codec::kMostBlock));
}

std::size_t ModuloCodec::block_bytes() const {
  return sizeof(std::uint32_t) + block_ * static_cast<std::size_t>(bits_) / 8;
}

std::size_t ModuloCodec::encode(const float* values, std::size_t count, const float* distances,
                                std::byte* encoded) const {
  const ResidueEncodeFn function = current_table().encode_residues[residue_index(bits_)];
  std::size_t infinite = 0;
  for (std::size_t begin = 0; begin < count; begin += block_, ++distances, encoded += block_bytes()) {
    infinite += function({values + begin, std::min(block_, count - begin), block_, *distances, encoded}) ? 0 : 1;
  }
  return infinite;
}

std::size_t ModuloCodec::change(const float* values, std::size_t count, const std::byte* own,
                                std::span<const std::byte* const> sources, float weight, float* change,
                                float* distances) const {
  const Table& table = current_table();
  const ResidueAddFn add = table.add_residues[residue_index(bits_)];
  const auto check = [&](const std::byte* encoded) {
    for (std::size_t place = 0; place < bytes(count); place += block_bytes()) {
      if (!is_valid(header_of(encoded + place)))
        throw UsageError("encoded values have a step that cannot be; were they encoded otherwise?");
    }
  };
  check(own);
  for (const std::byte* source : sources) check(source);
  std::fill_n(change, count, 0.0F);
  if (sources.empty()) return 0;
  std::size_t missed = 0, place = 0;
  for (std::size_t begin = 0; begin < count; begin += block_, ++distances, place += block_bytes()) {
    const std::size_t here = std::min(block_, count - begin);
    const auto infinite = [&](const std::byte* encoded) { return header_of(encoded + place) == kNotFinite; };
    if (infinite(own) || std::any_of(sources.begin(), sources.end(), infinite)) {
      std::fill_n(change + begin, here, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    float estimate = kDecay * *distances;
    for (const std::byte* source : sources) {
      float distance = 0;
      if (!add({values + begin, here, block_, own + place, source + place, weight, change + begin, &distance})) {
        ++missed;
        const float window = reach_of(bits_) * std::bit_cast<float>(step_bits(header_of(source + place)));
        const float largest = std::bit_cast<float>(table.largest(values + begin, here));
        distance = std::max(kGrowth * window, kLeast * largest);
      }
      estimate = std::max(estimate, distance);
    }
    *distances = std::min(estimate, std::numeric_limits<float>::max());
  }
  return missed;
}

}  // namespace sordino::kernels
