// The samples that moved most: the steps of select_ops.h, and what the block does together between them.
#include "kernels/cuda/items_plan.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/select_ops.h"

namespace sordino::kernels::cuda {
namespace {

constexpr std::uint32_t kSelecting = 1024, kWarp = 32;  // threads

// The sum of what the threads before this one have, and in `all` that of all threads.
__device__ std::uint64_t exclusive_sum(std::uint64_t own, std::uint64_t& all) {
  __shared__ std::uint64_t of_warps[kWarp];
  const std::uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  std::uint64_t sum = own;
  for (std::uint32_t distance = 1; distance < kWarp; distance *= 2) {
    const std::uint64_t before = __shfl_up_sync(0xffffffff, sum, distance);
    if (lane >= distance) sum += before;
  }
  if (lane == kWarp - 1) of_warps[warp] = sum;
  __syncthreads();
  std::uint64_t before = 0;
  all = 0;
  for (std::uint32_t other = 0; other < kSelecting / kWarp; ++other) {
    if (other < warp) before += of_warps[other];
    all += of_warps[other];
  }
  __syncthreads();
  return before + sum - own;
}

template <class Batch>
__global__ void __launch_bounds__(kSelecting) select_rows(const __grid_constant__ Batch batch) {
  __shared__ std::uint32_t bins[kBins];
  __shared__ Cut cut;
  const Row row{batch.row(blockIdx.x), batch.first_row + blockIdx.x};
  const std::uint64_t count = batch.count(blockIdx.x);
  if (threadIdx.x < kBins) bins[threadIdx.x] = 0;
  __syncthreads();
  count_counters(row, count, threadIdx.x, kSelecting,
                 [&](std::uint32_t counter, std::uint32_t times) { atomicAdd(&bins[counter], times); });
  __syncthreads();
  if (threadIdx.x == 0) cut = cut_of(bins, row.words[2]);
  __syncthreads();
  Taken before{0, 0};
  for (std::uint64_t tile = 0; tile < sixteens_of(row, count); tile += kSelecting) {
    const Sixteen found = load_sixteen(row, count, tile + threadIdx.x);
    const Taken own = taken_of(found, cut);
    std::uint64_t all;
    const std::uint64_t others = exclusive_sum(std::uint64_t{own.ties} << 32 | own.above, all);
    write_taken(
        row, found, cut,
        {before.above + static_cast<std::uint32_t>(others), before.ties + static_cast<std::uint32_t>(others >> 32)});
    before.above += static_cast<std::uint32_t>(all);
    before.ties += static_cast<std::uint32_t>(all >> 32);
  }
}

}  // namespace

void CudaKernels::select(const Items& items, const std::byte* counters, std::byte* indices, Stream stream) {
  const Current current(ordinal_);
  plan(selections(items, counters, indices), 1, [&](const auto& batch, std::uint32_t) {
    launch("select", select_rows<std::remove_cvref_t<decltype(batch)>>, batch.rows, kSelecting, 0, cuda_stream(stream),
           batch);
  });
}

}  // namespace sordino::kernels::cuda
