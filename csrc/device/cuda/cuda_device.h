// GPUs by CUDA. What needs CUDA lives in a library of its own (libsordino_cuda.so) that is opened at run time; where it
// was not built, or does not load, obstacle() says so.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"

namespace sordino::cuda {

// What the library was compiled with and for, as in "CUDA 13.0, sm_80 sm_90 + PTX"; empty without it.
std::string description();
// GPUs that CUDA finds: none without a driver.
int count();
// Why there is none, and the mend; empty if there is one.
std::string obstacle();

// One object a process for each GPU. NotBuilt if this build has no CUDA, or none for this GPU or its driver;
// DeviceError if there is no such GPU.
std::shared_ptr<Device> make_device(int ordinal);

// The same, as the library has them.
struct Plugin {
  const char* description;
  int (*count)();
  std::string (*obstacle)();
  std::shared_ptr<Device> (*make_device)(int ordinal);
};
using PluginFunction = const Plugin* (*)();
inline constexpr const char* kPluginSymbol = "sordino_cuda_plugin";

}  // namespace sordino::cuda
