// A stand-in for the parts of CUDA's runtime that the kernels' host code needs: memory is the host's, and a launch is
// noted, not made.
#include "fake_cudart.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

namespace sordino::test {

std::vector<std::string>& launches() {
  static std::vector<std::string> all;
  return all;
}

}  // namespace sordino::test

namespace {

struct Size {
  unsigned x, y, z;
};

std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> all;
  return all;
}

std::set<const void*>& loaded() {
  static std::set<const void*> all;
  return all;
}
constexpr int kNotLoaded = 1;

// Functions of the driver, which make contexts current.
int retain(void** context, int) {
  *context = context;
  return 0;
}
int push(void*) { return 0; }
int get_device(int* device, int) { return *device = 0; }
int pop(void**) { return 0; }
const std::map<std::string, void*> driver{{"cuDeviceGet", reinterpret_cast<void*>(get_device)},
                                          {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain)},
                                          {"cuCtxPushCurrent", reinterpret_cast<void*>(push)},
                                          {"cuCtxPopCurrent", reinterpret_cast<void*>(pop)}};

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  kernels()[kernel] = name;
}
int cudaGetDevice(int* device) { return *device = 0; }
int cudaFuncGetAttributes(void*, const void* kernel) {
  loaded().insert(kernel);
  return 0;
}
int cudaLaunchKernel(const void* kernel, Size, Size, void**, std::size_t, void*) {
  // With CUDA, the first launch of a kernel that is not loaded would wait for streams that wait for peers.
  if (!loaded().contains(kernel)) return kNotLoaded;
  sordino::test::launches().push_back(kernels().at(kernel));
  return 0;
}
// Functions behind <<<>>>, which are never called.
int __cudaGetKernel(void**, const void*) { std::abort(); }
int __cudaLaunchKernel(void*, Size, Size, void**, std::size_t, void*) { std::abort(); }
unsigned __cudaPopCallConfiguration(Size*, Size*, std::size_t*, void*) { std::abort(); }

int cudaMemsetAsync(void* data, int value, std::size_t bytes, void*) {
  std::memset(data, value, bytes);
  return 0;
}
int cudaThreadExchangeStreamCaptureMode(int*) { return 0; }
int cudaGetLastError() { return 0; }
const char* cudaGetErrorName(int) { return "none"; }
const char* cudaGetErrorString(int) { return "no error"; }
int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int*) {
  *function = driver.at(name);
  return 0;
}
}
