// largest.cu, and before it the memory that its `extern __shared__` array stands for.
#include <cuda_runtime.h>

#include <cstdint>

namespace sordino::kernels::cuda {
namespace {
thread_local std::uint16_t positions[16384];  // the values of the largest block
const on_cpu::DynamicShared declared([] { return static_cast<void*>(positions); }, sizeof(positions));
}  // namespace
}  // namespace sordino::kernels::cuda

#include "kernels/cuda/largest.cu"
