// GPUs by CUDA. Where CUDA was not built in, no_cuda_device.cc says so.
#pragma once

#include <memory>

#include "device/device.h"

namespace sordino::cuda {

// GPUs that can be used: none without a driver.
int count();

// One object a process for each GPU. NotBuilt if this build has no CUDA; DeviceError if there is no such GPU.
std::shared_ptr<Device> make_device(int ordinal);

}  // namespace sordino::cuda
