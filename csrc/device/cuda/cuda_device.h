// GPUs by CUDA. Where CUDA was not built in, no_cuda_device.cc says so.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"

namespace sordino::cuda {

// GPUs that CUDA finds: none without a driver.
int count();
// Why there is none, and the mend; empty if there is one.
std::string obstacle();

// One object a process for each GPU. NotBuilt if this build has no CUDA, or none for this GPU or its driver;
// DeviceError if there is no such GPU.
std::shared_ptr<Device> make_device(int ordinal);

}  // namespace sordino::cuda
