// CUDA GPUs. All code that needs CUDA is in a separate library (libsordino_cuda.so), which is opened at run time. If it
// was not built or does not load, obstacle() returns the reason.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"

namespace sordino::cuda {

// CUDA version and architectures of the library, as in "CUDA 13.0, sm_80 sm_90 + PTX"; empty if there is no library.
std::string description();
// Number of GPUs that CUDA finds; 0 if there is no driver or no library.
int count();
// The reason why there is no GPU, and the fix; empty if there is a GPU.
std::string obstacle();

// Returns this process's only object for a GPU. Throws NotBuilt if this build has no CUDA, or no kernels for this GPU
// or its driver. Throws DeviceError if there is no such GPU.
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
