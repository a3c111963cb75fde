// Sums over the threads of a block or warp.
#pragma once

#include <cstdint>

namespace sordino::kernels::cuda {

inline constexpr std::uint32_t kWarp = 32, kAllLanes = 0xffffffff;

// Returns the sum of `own` over all threads before this one, and sets `all` to the sum over all threads. Called by all
// threads of a block of kScanned threads.
template <std::uint32_t kScanned, class Number>
__device__ Number exclusive_sum(Number own, Number& all) {
  constexpr std::uint32_t kWarps = kScanned / kWarp;
  __shared__ Number of_warps[kWarps];
  const std::uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Number sum = own;
  for (std::uint32_t distance = 1; distance < kWarp; distance *= 2) {
    const Number before = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += before;
  }
  if (lane == kWarp - 1) of_warps[warp] = sum;
  __syncthreads();
  Number before = 0;
  all = 0;
  for (std::uint32_t other = 0; other < kWarps; ++other) {
    if (other < warp) before += of_warps[other];
    all += of_warps[other];
  }
  __syncthreads();
  return before + sum - own;
}

// The sum over a warp's lanes in every lane: the upper half of the lanes is added to the lower half until one is left,
// as on the CPU (codes.h). The two lanes of an addition add in opposite orders, which gives the same bits.
template <class Number>
__device__ Number warp_sum(Number own) {
  for (std::uint32_t distance = kWarp / 2; distance > 0; distance /= 2) {
    own += __shfl_xor_sync(kAllLanes, own, static_cast<int>(distance));
  }
  return own;
}

}  // namespace sordino::kernels::cuda
