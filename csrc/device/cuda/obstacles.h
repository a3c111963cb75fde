// Messages that say why GPUs cannot be used, and the fix. They need no CUDA, so tests run without a GPU.
#pragma once

#include <string>

namespace sordino::cuda {

// Version as CUDA encodes it: 13010 is 13.1. The driver's is 0 without a driver.
inline std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

inline std::string driver_too_old(int driver, int runtime) {
  if (driver == 0) return "there is no CUDA driver: install NVIDIA's (nvidia-smi shows it)";
  return "the GPU's driver supports CUDA up to " + version_text(driver) + ", and Sordino was built with CUDA " +
         version_text(runtime) + ": update the driver, or install Sordino again from source with the nvcc of CUDA " +
         std::to_string(driver / 1000) + " (CUDACXX=/path/to/nvcc)";
}

// `built`: CUDA version and architectures of the kernels, as in "CUDA 13.0, sm_80 sm_90 + PTX".
inline std::string no_kernels_for(const std::string& gpu, int major, int minor, const std::string& built) {
  const std::string architecture = std::to_string(major) + std::to_string(minor);
  return gpu + " has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
         ", and this build of Sordino (" + built +
         ") has no kernels for it: install it again from source with "
         "`pip install . -C cmake.define.SORDINO_CUDA_ARCHITECTURES=" +
         architecture + "`, with an nvcc that knows sm_" + architecture + " (CUDA 13 knows 7.5 and later)";
}

}  // namespace sordino::cuda
