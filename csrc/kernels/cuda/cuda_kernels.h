// The kernels of device/device.h on NVIDIA's GPUs. Without nvcc there is no_cuda.cc in place of all of this folder.
#pragma once

#include <memory>

#include "device/device.h"

namespace sordino::kernels::cuda {

bool built();

// For the CUDA device `ordinal`, whose streams are cudaStream_t. NotBuilt without CUDA; DeviceError if the device is
// not there or refuses.
std::unique_ptr<Kernels> make(int ordinal);

}  // namespace sordino::kernels::cuda
