// What all CUDA code shares: errors, and the current device.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "base/error.h"
#include "kernels/device_kernels.h"

namespace sordino::kernels::cuda {

template <class Failure = DeviceError>
void check(cudaError_t error, const std::string& call) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // what is raised here is not to be found again by somebody's next call
  throw Failure(call + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

inline cudaStream_t cuda_stream(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Whether this process uses a device already.
inline bool has_context(int ordinal) {
  using GetState = CUresult (*)(CUdevice, unsigned int*, int*);
  static const GetState get_state = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    constexpr const char* kName = "cuDevicePrimaryCtxGetState";
#if CUDART_VERSION >= 12050
    constexpr unsigned int kSince = 7000;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(kName, &function, kSince, cudaEnableDefault, &found);
#else  // which has the other one only; later ones say that it is deprecated
    const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    return reinterpret_cast<GetState>(function);
  }();
  unsigned int flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(ordinal, &flags, &active) == CUDA_SUCCESS && active != 0;
}

// Makes a device the current one of this thread for as long as it lives: whoever called may use another. One that
// nobody in this process uses is not made current again: that alone would take hundreds of megabytes there.
class Current {
 public:
  explicit Current(int ordinal) : ordinal_(ordinal) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != ordinal_) check(cudaSetDevice(ordinal_), "cudaSetDevice");
  }
  ~Current() {
    if (before_ != ordinal_ && has_context(before_)) static_cast<void>(cudaSetDevice(before_));
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int ordinal_, before_ = 0;
};

}  // namespace sordino::kernels::cuda
