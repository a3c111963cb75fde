// GPUs by CUDA. All code that needs CUDA is in a library of its own (libsordino_cuda.so), which is opened at run time.
// obstacle() returns the reason if that library was not built or does not load.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"

namespace sordino::cuda {

// CUDA version and architectures of the library, as in "CUDA 13.0, sm_80 sm_90 + PTX"; empty without it.
std::string description();
// Number of GPUs that CUDA finds: 0 without a driver.
int count();
// Why there is no GPU, and the fix; empty if there is one.
std::string obstacle();

// Returns the one object of this process for a GPU. Throws NotBuilt if this build has no CUDA, or no kernels for this
// GPU or its driver, and DeviceError if there is no such GPU.
std::shared_ptr<Device> make_device(int ordinal);

// The same functions, as the library exports them.
struct Plugin {
  const char* description;
  int (*count)();
  std::string (*obstacle)();
  std::shared_ptr<Device> (*make_device)(int ordinal);
};
using PluginFunction = const Plugin* (*)();
inline constexpr const char* kPluginSymbol = "sordino_cuda_plugin";

}  // namespace sordino::cuda
