// Devices, contexts, errors, and the functions of the driver.
#include <array>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control.h"
#include "memory.h"
#include "queues.h"

namespace on_cpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::vector<CUcontext> contexts;
std::atomic<bool> words{true};
std::atomic<int> driver_error{0};

struct Name {
  cudaError_t code;
  const char* name;
  const char* text;
};
constexpr std::array kNames{
    Name{cudaSuccess, "cudaSuccess", "no error"},
    Name{cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    Name{cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    Name{cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    Name{cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
         "CUDA driver version is insufficient for CUDA runtime version"},
    Name{cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    Name{cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    Name{cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    Name{cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
         "no kernel image is available for execution on the device"},
    Name{cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    Name{cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    Name{cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
         "operation not permitted when stream is capturing"},
};
const Name* find(cudaError_t code) {
  for (const Name& name : kNames) {
    if (name.code == code) return &name;
  }
  return nullptr;
}

// ---- the driver
// --------------------------------------------------------------------------------------------------------

CUresult device_get(CUdevice* device, int ordinal) {
  called("cuDeviceGet");
  *device = ordinal;
  return ordinal < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult retain(CUcontext* context, CUdevice device) {
  called("cuDevicePrimaryCtxRetain");
  static std::mutex mutex;
  static auto* all = new std::map<CUdevice, CUcontext>;
  std::lock_guard lock(mutex);
  CUcontext& primary = (*all)[device];
  if (primary == nullptr) primary = new CUctx_st{device};
  *context = primary;
  return CUDA_SUCCESS;
}
CUresult push(CUcontext context) {
  called("cuCtxPushCurrent");
  contexts.push_back(context);
  return CUDA_SUCCESS;
}
CUresult pop(CUcontext* context) {
  called("cuCtxPopCurrent");
  if (contexts.empty()) fault("cuCtxPopCurrent without a context");
  *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}
CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  called("cuDeviceGetAttribute");
  *value = words;
  return CUDA_SUCCESS;
}

std::atomic<std::uint64_t>* word_at(CUdeviceptr address) {
  auto* word = reinterpret_cast<std::atomic<std::uint64_t>*>(address);
  return address % sizeof(*word) == 0 && is_registered(word, sizeof(*word)) ? word : nullptr;
}
// Driver reference: earlier work of the stream is fenced before the write.
CUresult write_value(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
  called("cuStreamWriteValue64");
  auto* word = word_at(address);
  if (word == nullptr || flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  put(stream, [=] { word->store(value, std::memory_order_release); }, "cuStreamWriteValue64");
  return CUDA_SUCCESS;
}
// Driver reference: waits until (int64_t)(*address - value) >= 0.
CUresult wait_value(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
  called("cuStreamWaitValue64");
  auto* word = word_at(address);
  if (word == nullptr || (flags & ~CU_STREAM_WAIT_VALUE_FLUSH) != CU_STREAM_WAIT_VALUE_GEQ) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  put(
      stream,
      [=] {
        while (static_cast<std::int64_t>(word->load(std::memory_order_acquire) - value) < 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
      },
      "cuStreamWaitValue64");
  return CUDA_SUCCESS;
}

struct EntryPoint {
  void* function;
  unsigned since;  // version of CUDA with this form of the function
};
const std::map<std::string, EntryPoint>& entry_points() {
  static const auto* all = new std::map<std::string, EntryPoint>{
      {"cuDeviceGet", {reinterpret_cast<void*>(&device_get), 2000}},
      {"cuDevicePrimaryCtxRetain", {reinterpret_cast<void*>(&retain), 7000}},
      {"cuCtxPushCurrent", {reinterpret_cast<void*>(&push), 4000}},
      {"cuCtxPopCurrent", {reinterpret_cast<void*>(&pop), 4000}},
      {"cuDeviceGetAttribute", {reinterpret_cast<void*>(&attribute), 2000}},
      // With an older version, the driver returns the first form, which devices have to allow in another way.
      {"cuStreamWriteValue64", {reinterpret_cast<void*>(&write_value), 11070}},
      {"cuStreamWaitValue64", {reinterpret_cast<void*>(&wait_value), 11070}},
  };
  return *all;
}

}  // namespace

int current_device(const char* call) {
  if (contexts.empty()) fault(std::string(call) + " without a current device");
  return contexts.back()->device;
}

std::size_t pushed_contexts() { return contexts.size(); }

cudaError_t failed(cudaError_t code) { return last_error = code; }

void set_words(bool there) { words = there; }
void set_driver_error(int code) { driver_error = code; }

}  // namespace on_cpu

using namespace on_cpu;

extern "C" {

cudaError_t cudaGetLastError() {
  called(__func__);
  return std::exchange(last_error, cudaSuccess);
}
const char* cudaGetErrorString(cudaError_t code) {
  called(__func__);
  const Name* found = find(code);
  return found != nullptr ? found->text : "an error without a text in the stand-in";
}
const char* cudaGetErrorName(cudaError_t code) {
  called(__func__);
  const Name* found = find(code);
  return found != nullptr ? found->name : "an error without a name in the stand-in";
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  called(__func__);
  *function = nullptr;
  const auto found = entry_points().find(name);
  if (found == entry_points().end()) {
    *result = cudaDriverEntryPointSymbolNotFound;
  } else if (version < found->second.since) {
    *result = cudaDriverEntryPointVersionNotSufficent;
  } else {
    *result = cudaDriverEntryPointSuccess;
    *function = found->second.function;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  called(__func__);
  *device = on_cpu::current_device(__func__);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  called(__func__);
  *count = driver_error != 0 ? 0 : device_count();
  if (driver_error != 0) return failed(static_cast<cudaError_t>(driver_error.load()));
  return *count == 0 ? failed(cudaErrorNoDevice) : cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int ordinal) {
  called(__func__);
  if (ordinal < 0 || ordinal >= device_count()) return failed(cudaErrorInvalidDevice);
  *properties = {"GPU on the CPU", 9, 0, 0, ordinal + 1, 0};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  called(__func__);
  *value = 1;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  called(__func__);
  *version = driver_error == cudaErrorInsufficientDriver ? 12000 : CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  called(__func__);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

}  // extern "C"
