#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mix_op.h"

namespace sordino::kernels::cuda {
namespace {

template <class Batch, class Operation>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mix_elements(const __grid_constant__ Batch batch, const __grid_constant__ Operation operation) {
  extern __shared__ Quad shared[];
  typename Operation::State state{shared + threadIdx.x, blockDim.x};
  walk(batch, blockIdx.x, threadIdx.x, blockDim.x, operation, state);
}

// Returns false if the call does not fit in a launch with these sizes.
template <int kWords, class Operation>
bool mix_with(const Table& table, std::size_t inputs, std::span<const Average> averages, bool direct,
              cudaStream_t stream) {
  Operation operation;
  if (table.width > kWords - 2 || !operation.describe(averages)) return false;
  operation.lists = static_cast<std::uint32_t>(table.width);
  operation.inputs = static_cast<std::uint32_t>(inputs);
  operation.direct = direct;
  constexpr std::size_t kShared = 48 << 10;  // bytes that a block may have by default
  const std::size_t slots = operation.slots();
  std::uint32_t threads = kThreads;
  while (threads > 32 && slots * threads * sizeof(Quad) > kShared) threads /= 2;
  const std::size_t shared = slots * threads * sizeof(Quad);
  if (shared > kShared) return false;
  constexpr std::size_t kSize = sizeof(typename Operation::Element);
  const std::uint32_t chunk = chunk_bytes(table.elements() * kSize);
  plan_batches<kWords>(table, kSize, chunk, [&](const auto& batch, std::uint32_t chunks) {
    launch("mix", mix_elements<Batch<kWords>, Operation>, chunks, threads, shared, stream, batch, operation);
  });
  return true;
}

}  // namespace

void CudaKernels::mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                      std::span<const Average> averages, std::size_t count, Stream stream) {
  dispatch_floating("mix", type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (averages.empty()) return;
    Table table(inputs.size() + outputs.size());
    for (const std::byte* input : inputs) table.words.push_back(word(input));
    for (const std::byte* output : outputs) table.words.push_back(word(output));
    table.counts.push_back(count);
    const bool direct = !clashes(inputs, outputs, averages);
    const auto queue = cuda_stream(stream);
    const Current current(ordinal_);
    if (mix_with<128, Mix<T, 512, 64, 4>>(table, inputs.size(), averages, direct, queue)) return;
    // With one pack at a time, the waiting averages need less shared memory.
    if (mix_with<2000, Mix<T, 4000, 384, 1>>(table, inputs.size(), averages, direct, queue)) return;
    throw UsageError("kernels::cuda::mix: " + std::to_string(averages.size()) + " averages of " +
                     std::to_string(inputs.size()) + " vectors are too many for one launch");
  });
}

}  // namespace sordino::kernels::cuda
