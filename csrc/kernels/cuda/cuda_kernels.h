// The kernels of kernels/device_kernels.h on NVIDIA's GPUs: a part of libsordino_cuda.so, as all of this folder.
#pragma once

#include <memory>

#include "kernels/device_kernels.h"

namespace sordino::kernels::cuda {

// For the CUDA device `ordinal`, whose streams are cudaStream_t. DeviceError if the device is not there or refuses.
std::unique_ptr<Kernels> make(int ordinal);

}  // namespace sordino::kernels::cuda
