// make(), flatten and unflatten.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/element_ops.h"
#include "kernels/cuda/launch.cuh"

namespace sordino::kernels::cuda {

std::unique_ptr<Kernels> make(int ordinal, Lender lender) {
  return std::make_unique<CudaKernels>(ordinal, std::move(lender));
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
