// Codecs: checks, sizes, and the loop over blocks. coding.h codes one block, for each instruction set.
#include "kernels/codecs.h"

#include <algorithm>
#include <bit>
#include <string>

#include "base/error.h"
#include "kernels/cpu/table.h"

namespace sordino::kernels {
namespace {

constexpr std::size_t kByte = 8;

// Bits of one value, without its position.
constexpr std::size_t bits_of(Code code) {
  constexpr std::size_t bits[kCodeCount] = {8, 4, 2, 1, 2, 32};
  return bits[static_cast<int>(code)];
}

// Bytes of a block's header.
constexpr std::size_t header_of(Code code) {
  constexpr std::size_t bytes[kCodeCount] = {4, 4, 4, 4, 8, 0};
  return bytes[static_cast<int>(code)];
}

}  // namespace

Codec::Codec(Code code, std::size_t block, std::size_t kept) : code_(code), block_(block), kept_(kept) {
  if (static_cast<int>(code) >= kCodeCount)
    throw UsageError("there is no codec " + std::to_string(static_cast<int>(code)));
  if (block < kLeastBlock || block > kMostBlock || !std::has_single_bit(block))
    throw UsageError("a codec's block is " + std::to_string(block) + ", and must be a power of two from " +
                     std::to_string(kLeastBlock) + " to " + std::to_string(kMostBlock));
  const bool sparse = code == Code::kTop || code == Code::kTopExact;
  if (sparse ? kept < 1 || kept > block : kept != 0)
    throw UsageError("a codec keeps " + std::to_string(kept) + " values of a block of " + std::to_string(block));
}

std::size_t Codec::bytes(std::size_t count) const {
  const std::size_t blocks = (count + block_ - 1) / block_;
  // A dense code pads the last block.
  if (!is_sparse()) return blocks * (header_of(code_) + block_ * bits_of(code_) / kByte);
  const auto of_block = [&](std::size_t values) {
    const std::size_t bits = std::min(kept_, values) * (bits_of(code_) + index_bits(block_));
    return header_of(code_) + (bits + kByte - 1) / kByte;
  };
  const std::size_t rest = count % block_;
  return count / block_ * of_block(block_) + (rest > 0 ? of_block(rest) : 0);
}

std::size_t Codec::encode(const float* values, std::size_t count, std::byte* encoded) const {
  const EncodeFn function = current_table().encode[static_cast<int>(code_)];
  const std::size_t step = bytes(block_);
  std::size_t infinite = 0;
  for (std::size_t begin = 0; begin < count; begin += block_, encoded += step) {
    infinite += function({values + begin, std::min(block_, count - begin), block_, kept_, encoded}) ? 0 : 1;
  }
  return infinite;
}

void Codec::decode(const std::byte* encoded, std::size_t count, float* values, float weight, bool add, float* given,
                   Outside outside) const {
  const DecodeFn function = current_table().decode[static_cast<int>(code_)];
  const std::size_t step = bytes(block_);
  for (std::size_t begin = 0; begin < count; begin += block_, encoded += step) {
    const std::size_t here = std::min(block_, count - begin);
    float* const counts = given == nullptr ? nullptr : given + begin;
    const bool inside = function({encoded, here, block_, kept_, values + begin, weight, add, counts});
    if (!inside && outside == Outside::kThrow)
      throw UsageError("encoded values name a position beyond the end of their block; were they encoded otherwise?");
  }
}

}  // namespace sordino::kernels
