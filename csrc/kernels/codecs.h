// Codecs: float32 values as a few bits each, to be sent.
//
// Values are encoded block by block, and each block has a header of its own. So an outlier costs precision in its own
// block only, and a part that begins at a multiple of the block size can be decoded alone. The last block may have
// fewer values.
//
//   kInt8, kInt4   q = round(x / scale), scale = the block's largest magnitude / 127 or 7
//   kTwoBit        the four levels of least square error for a normal distribution with the block's root mean square
//   kSign          the sign of x, times the block's mean magnitude
//   kTop           the `kept` largest magnitudes of a block with their positions, and of equal ones the first. A value
//                  is its sign and one of two magnitudes: the mean of those above the mean, and of those below it
//   kTopExact      the same with exact values
//
// A block with a NaN or an infinity decodes to NaN in all its values (kTop: in those that are kept; kTopExact: to the
// values themselves), so that nothing that is not finite becomes finite. Blocks with no magnitude from 2^-100 on decode
// to 0, but for kTop and kTopExact.
//
// All functions accept any count (0 included), never allocate, never throw on valid arguments, and give the same bits
// at every instruction set level. Kernels::encode and decode (device_kernels.h) are the same on devices; codes.h has
// the formulas and the order of sums.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sordino::kernels {

enum class Code : std::uint8_t { kInt8 = 0, kInt4, kTwoBit, kSign, kTop, kTopExact };
inline constexpr int kCodeCount = 6;

// Bits of a position in a block, whose size is a power of two.
static constexpr std::uint32_t index_bits(std::size_t block) {
  std::uint32_t bits = 0;
  while (block >> bits > 1) ++bits;
  return bits;
}

class Codec {
 public:
  static constexpr std::size_t kLeastBlock = 32, kMostBlock = 16384;

  // `block`: values of a block, a power of two from kLeastBlock to kMostBlock. `kept`: for the last two codes, from 1
  // to `block`; else 0. Throws UsageError for others.
  Codec(Code code, std::size_t block, std::size_t kept);

  Code code() const { return code_; }
  std::size_t block() const { return block_; }
  std::size_t kept() const { return kept_; }
  bool is_sparse() const { return kept_ > 0; }

  // Size of `count` encoded values.
  std::size_t bytes(std::size_t count) const;

  // Writes bytes(count) bytes. Returns the number of blocks with a value that is not finite.
  std::size_t encode(const float* values, std::size_t count, std::byte* encoded) const;

  // Positions beyond the end of their block, in bytes that no encode() has written: UsageError, or left out.
  enum class Outside { kThrow, kLeaveOut };

  // values[i] = weight * x[i], where x are the encoded values; or, if `add`, values[i] += weight * x[i]. Where a sparse
  // code has no value, x is 0. `given`, if it is not null, goes up by one where it has one.
  void decode(const std::byte* encoded, std::size_t count, float* values, float weight, bool add, float* given,
              Outside outside = Outside::kThrow) const;

 private:
  Code code_;
  std::size_t block_, kept_;
};

}  // namespace sordino::kernels
