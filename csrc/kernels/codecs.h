// Codecs: encode float32 values in a few bits each, to be sent.
//
// Values are encoded block by block, and each block has a header of its own. So an outlier costs precision only in its
// block, and a part that begins at a multiple of the block size can be decoded alone. The last block may be shorter.
//
//   kInt8, kInt4   q = round(x / scale), scale = the block's largest magnitude / 127 or 7
//   kTwoBit        the 4 levels with the least square error for a normal distribution with the block's root mean square
//   kSign          the sign of x, times the block's mean magnitude
//   kTop           the `kept` largest magnitudes of a block (of equal ones, the first), with positions. A value is
//                  its sign and one of two levels: the mean of the kept magnitudes above their mean, or of the others
//   kTopExact      the same with exact values
//
// A block with a NaN or an infinity decodes to NaN in all its values (kTop: in all kept values; kTopExact: to the
// values themselves), so values that are not finite never become finite. A block whose magnitudes are all below 2^-100
// decodes to 0, except with kTop and kTopExact.
//
// All functions accept any count (0 included), never allocate, never throw on valid arguments, and give the same bits
// at every instruction set level. Kernels::encode and decode (device_kernels.h) do the same on devices. codes.h has the
// formulas and the order of sums.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sordino::kernels {

enum class Code : std::uint8_t { kInt8 = 0, kInt4, kTwoBit, kSign, kTop, kTopExact };
inline constexpr int kCodeCount = 6;

// Number of bits of a position in a block of `block` values, a power of two.
static constexpr std::uint32_t index_bits(std::size_t block) {
  std::uint32_t bits = 0;
  while (block >> bits > 1) ++bits;
  return bits;
}

class Codec {
 public:
  static constexpr std::size_t kLeastBlock = 32, kMostBlock = 16384;

  // `block`: values of a block, a power of two from kLeastBlock to kMostBlock. `kept`: 1 to `block` for kTop and
  // kTopExact, else 0. Throws UsageError for other numbers.
  Codec(Code code, std::size_t block, std::size_t kept);

  Code code() const { return code_; }
  std::size_t block() const { return block_; }
  std::size_t kept() const { return kept_; }
  bool is_sparse() const { return kept_ > 0; }

  // Size of `count` encoded values, in bytes.
  std::size_t bytes(std::size_t count) const;

  // Writes bytes(count) bytes. Returns the number of blocks with a value that is not finite.
  std::size_t encode(const float* values, std::size_t count, std::byte* encoded) const;

  // For positions beyond the end of their block, which encode() never writes: throw UsageError, or leave them out.
  enum class Outside { kThrow, kLeaveOut };

  // values[i] = weight * x[i], where x are the encoded values; or, if `add`, values[i] += weight * x[i]. Where a sparse
  // code has no value, x is 0. given[i], if `given` is not null, goes up by 1 where the code has a value.
  void decode(const std::byte* encoded, std::size_t count, float* values, float weight, bool add, float* given,
              Outside outside = Outside::kThrow) const;

 private:
  Code code_;
  std::size_t block_, kept_;
};

}  // namespace sordino::kernels
