// The kernels of kernels/device_kernels.h on NVIDIA's GPUs: a part of libsordino_cuda.so, as all of this folder.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "kernels/device_kernels.h"

namespace sordino::kernels::cuda {

// Who lends memory of the device for a while, as Device::take() and Device::give_back() do.
struct Lender {
  std::function<std::byte*(std::size_t, Stream)> take;
  std::function<void(std::byte*, Stream)> give_back;
};

// For the CUDA device `ordinal`, whose streams are cudaStream_t. DeviceError if the device is not there or refuses.
std::unique_ptr<Kernels> make(int ordinal, Lender lender);

}  // namespace sordino::kernels::cuda
