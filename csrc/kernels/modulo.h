// Modulo codes: encode float32 values in a few bits each, for a receiver whose own values are near them.
//
// Values are encoded block by block. The sender rounds a value x to an integer q = round(x / step), and sends the low
// bits of q. The receiver has a value y, and takes the integer with these low bits that is nearest to y / step. This is
// q if |x - y| is at most the *window*, reach * step, where reach = 2^(bits - 1) - 2. So the error, at most half a
// step, is in proportion to the distance of two workers, and not to their values. Source: Lu & De Sa 2020 (Moniqua);
// Davies et al. 2020. There, the window is a setting for all values. Here, each block has an estimate of the distance.
//
//   step       1, 1.25, 1.5 or 1.75 times a power of two, so that step * q is exact. The smallest step with
//              margin * distance <= window and |q| <= 2^21
//   margin     window in units of the distance. It is larger with 8 bits, whose error is small anyway
//   header     4 bytes: the step, and a checksum of the integers q
//   distance   estimate of the largest |x - y| of a block. Ranks update it from the values that they decode
//
// If the window was too small, the receiver computes other integers. The checksum detects this, except in 1 of 2^22
// cases. Such a block is *missed*: it changes only the estimate. A block with a NaN, an infinity or a magnitude of at
// least 2^126 makes all changes of the block NaN.
//
// All functions accept any count (0 included), never allocate, never throw on valid arguments, and give the same bits
// at every instruction set level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sordino::kernels {

class ModuloCodec {
 public:
  static constexpr float kMargin4 = 2, kMargin8 = 3;
  static constexpr float kDecay = 0.75F;  // factor of the estimate per exchange, if workers come closer
  static constexpr float kGrowth = 2;     // estimate after a missed block, in units of the window that was too small
  static constexpr float kLeast = 1.0F / 64;  // least estimate after a missed block, in units of the largest |y|

  // `bits`: 4 or 8. `block`: values of a block, a power of two from 32 to 16384. Throws UsageError for other numbers.
  ModuloCodec(int bits, std::size_t block);

  int bits() const { return bits_; }
  std::size_t block() const { return block_; }
  std::size_t blocks(std::size_t count) const { return (count + block_ - 1) / block_; }

  // Size of `count` encoded values, in bytes.
  std::size_t bytes(std::size_t count) const { return blocks(count) * block_bytes(); }

  // Writes bytes(count) bytes. `distances`: an estimate for each block, at least 0. Returns the number of blocks with a
  // value that is not finite, or at least 2^126 in magnitude.
  std::size_t encode(const float* values, std::size_t count, const float* distances, std::byte* encoded) const;

  // Computes the changes of a worker that mixes with others, and updates its estimates:
  //   change[i] = weight * (sum over sources of (Q(x[i]) - Q(y[i])))    Q(x) = step * round(x / step)
  // where y are this worker's values, and Q(y) is what it has sent. Missed blocks are left out.
  //
  // `own`: the result of encode() for `values`. `sources`: results of other workers. Returns the number of missed
  // blocks of all sources. Throws UsageError, and changes nothing, if a block has a step that encode() never writes.
  std::size_t change(const float* values, std::size_t count, const std::byte* own,
                     std::span<const std::byte* const> sources, float weight, float* change, float* distances) const;

 private:
  std::size_t block_bytes() const;

  int bits_;
  std::size_t block_;
};

}  // namespace sordino::kernels
