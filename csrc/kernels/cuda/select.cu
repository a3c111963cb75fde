// Selection of the elements with the highest counters: kernels for the steps of select_ops.h.
#include "kernels/cuda/items_plan.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/scan.cuh"
#include "kernels/cuda/select_ops.h"

namespace sordino::kernels::cuda {
namespace {

constexpr std::uint32_t kSelecting = 1024;  // threads

// Returns the cut of a row whose histogram is `bins`.
__device__ Cut find_cut(const Row& row, const std::uint32_t* bins) {
  __shared__ Cut cut;
  const std::uint32_t counter = kBins - 1 - threadIdx.x;
  const std::uint64_t times = threadIdx.x < kBins ? bins[counter] : 0;
  std::uint64_t all;
  const std::uint64_t above = exclusive_sum<kSelecting>(times, all);
  if (is_lowest(times, above, row.words[2])) cut = {counter, static_cast<std::uint32_t>(row.words[2] - above)};
  __syncthreads();
  return cut;
}

// Packs two numbers below 2^32, so that one sum adds both.
__device__ std::uint64_t packed(const Taken& taken) { return std::uint64_t{taken.ties} << 32 | taken.above; }
__device__ Taken unpacked(std::uint64_t sums) {
  return {static_cast<std::uint32_t>(sums), static_cast<std::uint32_t>(sums >> 32)};
}

// A block's chunk, and its row.
template <class Batch>
struct Part {
  const Chunk chunk;
  const Row row;
  const std::uint64_t end;
  __device__ explicit Part(const Batch& batch)
      : chunk(find_chunk(batch, blockIdx.x, 1)),
        row{batch.row(chunk.row), batch.first_row + chunk.row},
        end(chunk.begin + chunk.count) {}
  // Position of this thread's `number`-th sixteen counters.
  __device__ std::uint64_t at(std::uint32_t number) const {
    return chunk.begin + std::uint64_t{number * kSelecting + threadIdx.x} * kWidest;
  }
};
constexpr std::uint32_t kSixteens = kSelectChunk / (kSelecting * kWidest);  // per thread

template <class Batch>
__global__ void __launch_bounds__(kSelecting) count_bins(const __grid_constant__ Batch batch, std::uint32_t* bins) {
  __shared__ std::uint32_t own[kBins];
  const Part part(batch);
  if (threadIdx.x < kBins) own[threadIdx.x] = 0;
  __syncthreads();
  count_counters(part.row, part.chunk.begin, part.end, threadIdx.x, kSelecting,
                 [&](std::uint32_t counter, std::uint32_t times) { atomicAdd(&own[counter], times); });
  __syncthreads();
  if (threadIdx.x < kBins && own[threadIdx.x] != 0) {
    atomicAdd(&bins[part.chunk.row * kBins + threadIdx.x], own[threadIdx.x]);
  }
}

template <class Batch>
__global__ void __launch_bounds__(kSelecting)
    count_taken(const __grid_constant__ Batch batch, const std::uint32_t* bins, Taken* taken) {
  const Part part(batch);
  const Cut cut = find_cut(part.row, bins + part.chunk.row * kBins);
  Taken own{0, 0};
  SORDINO_UNROLL
  for (std::uint32_t k = 0; k < kSixteens; ++k) own.add(taken_of(load_sixteen(part.row, part.at(k), part.end), cut));
  std::uint64_t all;
  exclusive_sum<kSelecting>(packed(own), all);
  if (threadIdx.x == 0) taken[blockIdx.x] = unpacked(all);
}

template <class Batch>
__global__ void __launch_bounds__(kSelecting)
    write_indices(const __grid_constant__ Batch batch, const std::uint32_t* bins, const Taken* taken) {
  const Part part(batch);
  const Cut cut = find_cut(part.row, bins + part.chunk.row * kBins);
  Taken before{0, 0};
  for (std::uint64_t chunk = batch.chunks_before(part.chunk.row) + threadIdx.x; chunk < blockIdx.x;
       chunk += kSelecting) {
    before.add(taken[chunk]);
  }
  std::uint64_t all;
  exclusive_sum<kSelecting>(packed(before), all);
  before = unpacked(all);
  for (std::uint32_t k = 0; k < kSixteens; ++k) {
    const Sixteen found = load_sixteen(part.row, part.at(k), part.end);
    Taken ahead = before;
    ahead.add(unpacked(exclusive_sum<kSelecting>(packed(taken_of(found, cut)), all)));
    write_taken(part.row, found, cut, ahead);
    before.add(unpacked(all));
  }
}

}  // namespace

void CudaKernels::select(const Items& items, const std::byte* counters, std::byte* indices, Stream stream) {
  const Current current(ordinal_);
  const auto queue = cuda_stream(stream);
  plan(selections(items, counters, indices), 1, kSelectChunk, [&](const auto& batch, std::uint32_t chunks) {
    using Batch = std::remove_cvref_t<decltype(batch)>;
    const std::size_t numbers = std::size_t{batch.rows} * kBins;
    const Scratch<std::uint32_t> bins(numbers, lender_, queue);
    const Scratch<Taken> taken(chunks, lender_, queue);
    std::uint32_t* const histograms = bins.data();
    Taken* const sums = taken.data();
    check(cudaMemsetAsync(histograms, 0, numbers * sizeof(std::uint32_t), queue), "cudaMemsetAsync");
    launch("select", count_bins<Batch>, chunks, kSelecting, 0, queue, batch, histograms);
    launch("select", count_taken<Batch>, chunks, kSelecting, 0, queue, batch, histograms, sums);
    launch("select", write_indices<Batch>, chunks, kSelecting, 0, queue, batch, histograms, sums);
  });
}

}  // namespace sordino::kernels::cuda
