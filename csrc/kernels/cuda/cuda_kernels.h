// The kernels of kernels/device_kernels.h on NVIDIA's GPUs. Without nvcc no_cuda_kernels.cc takes the place of all
// others of this folder.
#pragma once

#include <memory>

#include "kernels/device_kernels.h"

namespace sordino::kernels::cuda {

bool built();

// For the CUDA device `ordinal`, whose streams are cudaStream_t. NotBuilt without CUDA; DeviceError if the device is
// not there or refuses.
std::unique_ptr<Kernels> make(int ordinal);

}  // namespace sordino::kernels::cuda
