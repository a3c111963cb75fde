// a * x + b * y, and LARS.
#include "kernels/cuda/element_ops.h"
#include "kernels/cuda/launch.cuh"

namespace sordino::kernels::cuda {
namespace {

// The tensors of lars_rates that one launch takes.
struct Scaled {
  static constexpr std::uint32_t kMost = 3072;
  std::uint32_t first, count;
  std::uint8_t scaled[kMost];
};

__global__ void __launch_bounds__(kThreads)
    compute_rates(const double* weight_norms, const double* gradient_norms, const __grid_constant__ Scaled part,
                  double* rates, const Kernels::LarsRates how) {
  const std::uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= part.count) return;
  const std::size_t tensor = std::size_t{part.first} + index;
  const double w = weight_norms[tensor], g = gradient_norms[tensor];
  const bool scaled = part.scaled[index] != 0 && w > 0 && g > 0;
  rates[tensor] = how.lr * (scaled ? how.trust * w / (g + how.decay * w + how.eps) : 1.0);
}

}  // namespace

void CudaKernels::axpby(DType type, const Rows& rows, double a, double b, Stream stream) {
  check_width("axpby", rows, 2);
  dispatch_floating("axpby", type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Current current(ordinal_);
    const Axpby<T> operation{2, static_cast<Stage<T>>(a), static_cast<Stage<T>>(b)};
    run_elementwise("axpby", table_of(rows), operation, cuda_stream(stream));
  });
}

void CudaKernels::lars_step(DType type, const Rows& rows, const double* rates, const LarsStep& how, Stream stream) {
  check_width("lars_step", rows, how.momentum == 0 ? 2 : 3);
  dispatch_floating("lars_step", type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Current current(ordinal_);
    const Lars<T> operation{static_cast<std::uint32_t>(rows.width), rates, static_cast<Stage<T>>(how.decay),
                            static_cast<Stage<T>>(how.momentum), how.nesterov};
    run_elementwise("lars_step", table_of(rows), operation, cuda_stream(stream));
  });
}

void CudaKernels::lars_rates(const double* weight_norms, const double* gradient_norms,
                             std::span<const std::uint8_t> scaled, double* rates, const LarsRates& how, Stream stream) {
  const Current current(ordinal_);
  for (std::size_t first = 0; first < scaled.size(); first += Scaled::kMost) {
    Scaled part{static_cast<std::uint32_t>(first),
                static_cast<std::uint32_t>(std::min<std::size_t>(scaled.size() - first, Scaled::kMost)),
                {}};
    std::copy_n(scaled.data() + first, part.count, part.scaled);
    launch("lars_rates", compute_rates, (part.count + kThreads - 1) / kThreads, kThreads, 0, cuda_stream(stream),
           weight_norms, gradient_norms, part, rates, how);
  }
}

}  // namespace sordino::kernels::cuda
