// Launches. A kernel is a function of C++ here, and a launch copies its arguments by their types.
#pragma once

#include <functional>
#include <memory>
#include <tuple>
#include <utility>

namespace on_cpu {

struct Launch {
  const void* kernel;
  std::function<void()> body;  // runs one thread
  dim3 grid, block;
  std::size_t shared, parameters;  // bytes
};
cudaError_t launch(Launch launch, cudaStream_t stream);

template <class... P>
cudaError_t typed_launch(void (*kernel)(P...), dim3 grid, dim3 block, void** arguments, std::size_t shared,
                         cudaStream_t stream) {
  std::size_t bytes = 0;
  ((bytes = (bytes + alignof(P) - 1) / alignof(P) * alignof(P) + sizeof(P)), ...);
  return [&]<std::size_t... k>(std::index_sequence<k...>) {
    const auto own = std::make_shared<const std::tuple<P...>>(*static_cast<const P*>(arguments[k])...);
    return launch({reinterpret_cast<const void*>(kernel), [kernel, own] { std::apply(kernel, *own); }, grid, block,
                   shared, bytes},
                  stream);
  }(std::index_sequence_for<P...>{});
}

// cudaLaunchKernel(reinterpret_cast<const void*>(kernel), ...) forgets the types of the parameters, which CUDA's
// compiler has noted elsewhere. The macro below turns the cast into this function, which keeps them.
template <class To, class Kernel>
Kernel keep_type_reinterpret_cast(Kernel kernel) {
  return kernel;
}

// Declares the memory of an `extern __shared__` array: its address on the calling thread, and its size.
struct DynamicShared {
  DynamicShared(void* (*address)(), std::size_t bytes);
};

}  // namespace on_cpu

#define cudaLaunchKernel(kernel, ...) ::on_cpu::typed_launch(::on_cpu::keep_type_##kernel, __VA_ARGS__)
