// Messages that say why a GPU cannot be used, and the fix. They do not need CUDA, so their tests need no GPU.
#pragma once

#include <string>

namespace sordino::cuda {

// Formats a version number of CUDA: 13010 is 13.1.
inline std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// `driver`: 0 if there is no driver.
inline std::string driver_too_old(int driver, int runtime) {
  if (driver == 0) return "there is no CUDA driver: install NVIDIA's (nvidia-smi shows it)";
  return "the GPU's driver supports CUDA up to " + version_text(driver) + ", and Sordino was built with CUDA " +
         version_text(runtime) + ": update the driver, or install Sordino again from source with the nvcc of CUDA " +
         std::to_string(driver / 1000) + " (CUDACXX=/path/to/nvcc)";
}

// Returns the reason why CUDA cannot load this build's kernels, if the fix is to build Sordino for the GPU; else an
// empty string. `code`: a cudaError_t.
inline std::string unloadable(int code) {
  const char* what = nullptr;
  switch (code) {
    case 98: what = "a kernel is missing"; break;
    case 200: what = "the kernels are of an unknown format"; break;
    case 209: what = "there is no code for this GPU"; break;
    case 218: what = "the PTX cannot be compiled for this GPU"; break;
    case 221: what = "the driver's compiler of PTX (libnvidia-ptxjitcompiler) is missing"; break;
    case 222: what = "the driver is too old for the PTX"; break;
    case 223: what = "the compilation of PTX is disabled (CUDA_DISABLE_PTX_JIT)"; break;
    default: return "";
  }
  return "CUDA error " + std::to_string(code) + ": " + what;
}

// `why`: from unloadable(). `built`: CUDA version and architectures of the kernels, as in "CUDA 13.0, sm_80 sm_90 +
// PTX".
inline std::string no_kernels_for(const std::string& gpu, int major, int minor, const std::string& built,
                                  const std::string& why) {
  const std::string architecture = std::to_string(major) + std::to_string(minor);
  return gpu + " has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
         ", and this build of Sordino (" + built + ") has no kernels for it (" + why +
         "): install it again from source with "
         "`pip install . -C cmake.define.SORDINO_CUDA_ARCHITECTURES=" +
         architecture + "`, with an nvcc that knows sm_" + architecture + " (CUDA 13 knows 7.5 and later)";
}

}  // namespace sordino::cuda
