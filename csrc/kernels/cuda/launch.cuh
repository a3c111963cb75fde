// Code that the .cu files share besides current.cuh: scratch memory, and the two kernels that run every operation.
#pragma once

#include <mutex>
#include <set>
#include <type_traits>
#include <utility>

#include "kernels/cuda/current.cuh"
#include "kernels/cuda/implementation.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/sum_ops.h"

namespace sordino::kernels::cuda {

// Device memory for the kernels that are put on a stream while this lives.
template <class T>
class Scratch {
 public:
  Scratch(std::size_t count, const Lender& lender, cudaStream_t stream)
      : lender_(lender), stream_(reinterpret_cast<Stream>(stream)) {
    if (count != 0) data_ = lender.take(count * sizeof(T), stream_);
  }
  ~Scratch() {
    if (data_ != nullptr) lender_.give_back(data_, stream_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* data() const { return reinterpret_cast<T*>(data_); }

 private:
  const Lender& lender_;
  Stream stream_;
  std::byte* data_ = nullptr;
};

// Loads a kernel on the current device, once. The first launch would do so, too, but would wait for all streams of the
// process. Some may wait for peers, which may wait for this kernel. A query of its attributes loads it without waiting
// (both measured on an H100 with driver 580).
inline void load(const char* name, const void* kernel) {
  static std::mutex mutex;
  static auto* loaded = new std::set<std::pair<int, const void*>>;  // threads may launch until the process ends
  int device = 0;
  check(cudaGetDevice(&device), name);
  std::lock_guard lock(mutex);
  if (loaded->contains({device, kernel})) return;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), name);
  loaded->emplace(device, kernel);
}
// Whether an argument may be passed for a parameter: the kernel gets the argument's bytes, without a conversion.
template <class Parameter, class Argument>
inline constexpr bool kPassesAs =
    std::is_same_v<Parameter, Argument> ||
    (std::is_pointer_v<Argument> && std::is_pointer_v<Parameter> && std::is_convertible_v<Argument, Parameter>);

// Replaces <<<>>>, which returns no error. A query for errors would also return errors of other calls.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), std::uint32_t blocks, std::uint32_t threads,
            std::size_t shared, cudaStream_t stream, const Arguments&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments) && (kPassesAs<Parameters, Arguments> && ...));
  if (blocks == 0) return;
  load(name, reinterpret_cast<const void*>(kernel));
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), pointers, shared, stream),
        name);
}

// Blocks per multiprocessor, which share its registers: each gets enough registers for its loads in flight. By default,
// the compiler allows for more blocks, and spills registers.
inline constexpr int kBlocks = 3;

template <class Batch, class Operation>
__global__ void __launch_bounds__(kThreads, kBlocks)
    elementwise(const __grid_constant__ Batch batch, const __grid_constant__ Operation operation) {
  typename Operation::State state;
  walk(batch, blockIdx.x, threadIdx.x, kThreads, operation, state);
}

// Returns the sum over a block, in thread 0. The order of additions is always the same.
template <class Sums>
__device__ inline Sums block_sum(Sums sums) {
  constexpr unsigned kWarp = 32, kAll = 0xffffffff;
  __shared__ typename Sums::Number of_warps[kThreads / kWarp][Sums::kCount];
  SORDINO_UNROLL
  for (unsigned distance = kWarp / 2; distance > 0; distance /= 2) {
    Sums other;
    SORDINO_UNROLL
    for (int j = 0; j < Sums::kCount; ++j) other.values[j] = __shfl_down_sync(kAll, sums.values[j], distance);
    sums.add(other);
  }
  SORDINO_UNROLL
  for (int j = 0; j < Sums::kCount; ++j) {
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp][j] = sums.values[j];
  }
  __syncthreads();
  for (unsigned warp = 1; threadIdx.x == 0 && warp < kThreads / kWarp; ++warp) {
    SORDINO_UNROLL
    for (int j = 0; j < Sums::kCount; ++j) sums.values[j] += of_warps[warp][j];
  }
  return sums;
}

template <class Batch, class Operation>
__global__ void __launch_bounds__(kThreads)
    sum_chunks(const __grid_constant__ Batch batch, const __grid_constant__ Operation operation,
               typename Operation::State* chunks) {
  typename Operation::State sums;
  walk(batch, blockIdx.x, threadIdx.x, kThreads, operation, sums);
  sums = block_sum(sums);
  if (threadIdx.x == 0) chunks[blockIdx.x] = sums;
}

template <class Batch, class Sums, class Finish>
__global__ void __launch_bounds__(kThreads)
    sum_rows(const __grid_constant__ Batch batch, const Sums* chunks, const __grid_constant__ Finish finish) {
  const Sums sums = block_sum(combine(batch, blockIdx.x, chunks, threadIdx.x, kThreads));
  if (threadIdx.x == 0) finish(Row{batch.row(blockIdx.x), batch.first_row + blockIdx.x}, sums);
}

template <class Operation>
void run_elementwise(const char* name, const Table& table, const Operation& operation, cudaStream_t stream) {
  constexpr std::size_t kSize = sizeof(typename Operation::Element);
  plan(table, kSize, chunk_bytes(table.elements() * kSize), [&](const auto& batch, std::uint32_t chunks) {
    using Batch = std::remove_cvref_t<decltype(batch)>;
    launch(name, elementwise<Batch, Operation>, chunks, kThreads, 0, stream, batch, operation);
  });
}

template <class Operation, class Finish>
void run_sums(const char* name, const Table& table, const Operation& operation, const Finish& finish,
              const Lender& lender, cudaStream_t stream) {
  using Sums = typename Operation::State;
  plan(table, sizeof(typename Operation::Element), kSumChunk, [&](const auto& batch, std::uint32_t chunks) {
    using Batch = std::remove_cvref_t<decltype(batch)>;
    const Scratch<Sums> scratch(chunks, lender, stream);
    Sums* const sums = scratch.data();
    launch(name, sum_chunks<Batch, Operation>, chunks, kThreads, 0, stream, batch, operation, sums);
    launch(name, sum_rows<Batch, Sums, Finish>, batch.rows, kThreads, 0, stream, batch, sums, finish);
  });
}

// Calls visitor(TypeTag<T>{}) with the storage type of a floating type.
template <class Visitor>
void dispatch_floating(const char* function, DType type, const Visitor& visitor) {
  check_floating(function, type);
  dispatch(type, [&](auto tag) {
    if constexpr (!std::is_integral_v<typename decltype(tag)::type> &&
                  !std::is_same_v<typename decltype(tag)::type, Bool>) {
      visitor(tag);
    }
  });
}

}  // namespace sordino::kernels::cuda
