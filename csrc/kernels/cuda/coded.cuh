// Blocks of one call of a codec, and loops over their values. Shared by codes.cu and largest.cu.
#pragma once

#include <limits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/scan.cuh"
// After pack.h, which defines SORDINO_LEVEL.
#include "kernels/codes.h"

namespace sordino::kernels::cuda {

inline constexpr std::uint32_t kWarps = kThreads / kWarp;
static_assert(kWarp == kSumLanes);

// The values of a call, in blocks.
struct Blocks {
  std::uint64_t count;        // values
  std::uint32_t block, kept;  // values of a block
  std::uint32_t bits;         // bits of a position in a block, which has 1 << bits values
  std::uint32_t bytes;        // bytes of an encoded block

  Blocks(const Codec& codec, std::size_t count)
      : count(count),
        block(static_cast<std::uint32_t>(codec.block())),
        kept(static_cast<std::uint32_t>(codec.kept())),
        bits(index_bits(codec.block())),
        bytes(static_cast<std::uint32_t>(codec.bytes(codec.block()))) {}
  SORDINO_BOTH std::uint64_t blocks() const { return (count + block - 1) >> bits; }
  // Number of values of block `number`: `block`, or fewer in the last block.
  SORDINO_BOTH std::uint32_t values_of(std::uint64_t number) const {
    const std::uint64_t left = count - (number << bits);
    return left < block ? static_cast<std::uint32_t>(left) : block;
  }
};

// Number of thread blocks for `work` items, if each block does `share` of them.
inline std::uint32_t grid_for(std::uint64_t work, std::uint64_t share) {
  const std::uint64_t blocks = (work + share - 1) / share;
  if (blocks > std::numeric_limits<std::int32_t>::max()) throw UsageError("kernels::cuda: more values than any memory");
  return static_cast<std::uint32_t>(blocks);
}

__device__ inline std::uint32_t magnitude_bits(float value) { return bits_of(value) & kMagnitude; }

// Calls use(i, values[i]) for i = thread, thread + threads and so on, in order. Several loads are in flight at once.
template <class Use>
__device__ void each_value(const float* values, std::uint32_t count, std::uint32_t thread, std::uint32_t threads,
                           const Use& use) {
  constexpr int kAhead = 4;
  for (std::uint32_t first = thread; first < count; first += kAhead * threads) {
    float found[kAhead];
    SORDINO_UNROLL
    for (int u = 0; u < kAhead; ++u) {
      const std::uint32_t at = first + u * threads;
      found[u] = at < count ? values[at] : 0;
    }
    SORDINO_UNROLL
    for (int u = 0; u < kAhead; ++u) {
      const std::uint32_t at = first + u * threads;
      if (at < count) use(at, found[u]);
    }
  }
}

// encode and decode for the sparse codes, on the current device.
void encode_largest(const Codec& codec, const float* values, std::size_t count, std::byte* encoded,
                    std::uint32_t* infinite, cudaStream_t stream);
void decode_largest(const Codec& codec, const std::byte* encoded, std::size_t count, float* values, float weight,
                    bool add, float* given, cudaStream_t stream);

}  // namespace sordino::kernels::cuda
