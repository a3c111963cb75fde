// Code that all CUDA files share: errors, and the current device.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <string>

#include "base/error.h"
#include "kernels/device_kernels.h"

namespace sordino::kernels::cuda {

template <class Failure = DeviceError>
void check(cudaError_t error, const std::string& call) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // clears the error, so that no other caller gets it
  throw Failure(call + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

inline cudaStream_t cuda_stream(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Driver functions. The runtime's functions would leave a thread that has no context with one.
struct Driver {
  CUresult (*device)(CUdevice*, int);
  CUresult (*retain)(CUcontext*, CUdevice);
  CUresult (*push)(CUcontext);
  CUresult (*pop)(CUcontext*);
};

// `since`: the CUDA version that introduced this form of the function.
template <class Function>
void find_in_driver(const char* name, Function*& function, unsigned int since = 7000) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault, &result), name);
#else  // has only this function, which later versions deprecate
  static_cast<void>(since);
  check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result), name);
#endif
  if (found == nullptr) throw DeviceError(std::string("the CUDA driver has no ") + name + ": install a newer one");
  function = reinterpret_cast<Function*>(found);
}

inline const Driver& driver() {
  static const Driver found = [] {
    Driver all{};
    find_in_driver("cuDeviceGet", all.device);
    find_in_driver("cuDevicePrimaryCtxRetain", all.retain);
    find_in_driver("cuCtxPushCurrent", all.push);
    find_in_driver("cuCtxPopCurrent", all.pop);
    return all;
  }();
  return found;
}

// The primary context of a device, which the runtime and PyTorch use, too. It is retained until the process ends. The
// list is never destroyed, because handles may be destroyed after static objects.
inline CUcontext context_of(int ordinal) {
  static std::mutex mutex;
  static auto* all = new std::map<int, CUcontext>;
  std::lock_guard lock(mutex);
  CUcontext& context = (*all)[ordinal];
  CUdevice device = 0;
  if (context == nullptr &&
      (driver().device(&device, ordinal) != CUDA_SUCCESS || driver().retain(&context, device) != CUDA_SUCCESS)) {
    throw DeviceError("GPU " + std::to_string(ordinal) +
                      " has no room for a context, or has failed: nvidia-smi lists the processes that use it");
  }
  return context;
}

// Makes a device current in this thread while it lives, and relaxes the capture mode: another thread may be capturing a
// CUDA graph, and calls such as cudaMalloc and cudaEventQuery, which add nothing to a graph, would end its capture.
class Current {
 public:
  explicit Current(int ordinal) {
    if (driver().push(context_of(ordinal)) != CUDA_SUCCESS)
      throw DeviceError("GPU " + std::to_string(ordinal) + " cannot be made current: it has failed (see nvidia-smi)");
    if (cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }
  ~Current() {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
    CUcontext popped = nullptr;
    static_cast<void>(driver().pop(&popped));
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // after the constructor: the thread's previous mode
};

}  // namespace sordino::kernels::cuda
