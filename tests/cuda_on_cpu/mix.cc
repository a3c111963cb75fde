// mix.cu, and before it the memory that its `extern __shared__` array stands for.
#include <cuda_runtime.h>

#include "kernels/cuda/pack.h"

namespace sordino::kernels::cuda {
namespace {
thread_local Quad shared[(48 << 10) / sizeof(Quad)];  // as much as a block may have by default
const on_cpu::DynamicShared declared([] { return static_cast<void*>(shared); }, sizeof(shared));
}  // namespace
}  // namespace sordino::kernels::cuda

#include "kernels/cuda/mix.cu"
