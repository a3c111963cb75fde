// The kernels of kernels/device_kernels.h on NVIDIA GPUs. This folder is part of libsordino_cuda.so.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "kernels/device_kernels.h"

namespace sordino::kernels::cuda {

// Source of temporary device memory, with the contracts of Device::take() and Device::give_back().
struct Lender {
  std::function<std::byte*(std::size_t, Stream)> take;
  std::function<void(std::byte*, Stream)> give_back;
};

// Makes the kernels of CUDA device `ordinal`, with cudaStream_t as streams. Throws DeviceError if the device fails.
std::unique_ptr<Kernels> make(int ordinal, Lender lender);

}  // namespace sordino::kernels::cuda
