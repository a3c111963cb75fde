// The class itself, flatten and unflatten.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/element_ops.h"
#include "kernels/cuda/launch.cuh"

namespace sordino::kernels::cuda {

std::unique_ptr<Kernels> make(int ordinal) { return std::make_unique<CudaKernels>(ordinal); }

CudaKernels::CudaKernels(int ordinal) : ordinal_(ordinal) {
  const Current current(ordinal_);
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = ordinal_;
  cudaMemPool_t pool = nullptr;
  check(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate");
  pool_ = pool;
  // Else every wait for the device would give the memory back to it.
  std::uint64_t keep = std::numeric_limits<std::uint64_t>::max();
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
}

CudaKernels::~CudaKernels() {
  if (pool_ != nullptr) static_cast<void>(cudaMemPoolDestroy(static_cast<cudaMemPool_t>(pool_)));
}

void CudaKernels::flatten(std::span<const Span> tensors, std::byte* flat, Stream stream) {
  const Current current(ordinal_);
  run_elementwise("flatten", copies(tensors, flat, true), Copy{2}, cuda_stream(stream));
}

void CudaKernels::unflatten(const std::byte* flat, std::span<const Span> tensors, Stream stream) {
  const Current current(ordinal_);
  run_elementwise("unflatten", copies(tensors, flat, false), Copy{2}, cuda_stream(stream));
}

}  // namespace sordino::kernels::cuda
