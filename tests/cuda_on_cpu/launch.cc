// Launches of kernels: limits, lazy loading, and the blocks of a grid.
#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "block.h"
#include "control.h"
#include "memory.h"
#include "queues.h"
#include "sanitizers.h"

extern "C" void* __tls_get_addr(std::size_t* module_and_offset);

namespace on_cpu {

void count_launch();

namespace {

constexpr int kGarbage = 0x5a;
// Programming guide: 48 KiB of shared memory without an attribute of the kernel; 32,764 bytes of parameters since 12.1.
constexpr std::size_t kMostShared = 48 << 10, kMostParameters = 32764;

struct Array {
  void* (*address)();
  std::size_t bytes;
};
std::vector<Array>& dynamic_arrays() {
  static auto* all = new std::vector<Array>;
  return *all;
}

// ---- lazy loading
// ----------------------------------------------------------------------------------------------------

struct Loaded {
  std::mutex mutex;
  std::set<std::pair<int, const void*>> kernels;  // by device
  int image_error = 0;
};
Loaded& loaded() {
  static auto* all = new Loaded;
  return *all;
}

// Returns whether the kernel was loaded before.
bool load(const void* kernel, int device) {
  static const bool eagerly = [] {
    const char* how = std::getenv("CUDA_MODULE_LOADING");
    return how != nullptr && std::strcmp(how, "EAGER") == 0;
  }();
  std::lock_guard lock(loaded().mutex);
  return !loaded().kernels.insert({device, kernel}).second || eagerly;
}

// ---- shared memory
// ---------------------------------------------------------------------------------------------------

// The thread-local variables of the library that a kernel belongs to: its __shared__ variables, and nothing else.
struct Module {
  std::size_t id = 0, bytes = 0;
};
Module module_of(const void* kernel) {
  struct Search {
    const void* wanted;
    Module found;
  } search{kernel, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* argument) {
        auto& search = *static_cast<Search*>(argument);
        bool ours = false;
        std::size_t bytes = 0;
        for (int k = 0; k < info->dlpi_phnum; ++k) {
          const auto& part = info->dlpi_phdr[k];
          const auto begin = info->dlpi_addr + part.p_vaddr, at = reinterpret_cast<ElfW(Addr)>(search.wanted);
          ours |= part.p_type == PT_LOAD && at >= begin && at < begin + part.p_memsz;
          if (part.p_type == PT_TLS) bytes = part.p_memsz;
        }
        if (!ours) return 0;
        if (info->dlpi_name[0] != '\0') search.found = {info->dlpi_tls_modid, bytes};  // not the program itself
        return 1;
      },
      &search);
  return search.found;
}

// Shared memory has arbitrary contents when a block begins.
void spoil(const Module& module) {
  if (module.bytes == 0) return;
  std::size_t index[2] = {module.id, 0};
  std::memset(__tls_get_addr(index), kGarbage, module.bytes);
}

class DynamicPart {
 public:
  explicit DynamicPart(std::size_t bytes) : bytes_(bytes) {
    for (const Array& array : bytes_ == 0 ? std::vector<Array>{} : dynamic_arrays()) {
      if (array.bytes > bytes_) forbid(static_cast<std::byte*>(array.address()) + bytes_, array.bytes - bytes_);
    }
  }
  ~DynamicPart() {
    for (const Array& array : bytes_ == 0 ? std::vector<Array>{} : dynamic_arrays()) {
      allow(array.address(), array.bytes);
      const auto* data = static_cast<const std::byte*>(array.address());
      for (std::size_t k = bytes_; k < array.bytes; ++k) {
        if (data[k] != std::byte{kGarbage}) fault("a block writes behind the shared memory of its launch");
      }
    }
  }
  DynamicPart(const DynamicPart&) = delete;
  DynamicPart& operator=(const DynamicPart&) = delete;

 private:
  const std::size_t bytes_;
};

// ---- the blocks of a grid
// --------------------------------------------------------------------------------------------

void run_grid(const Launch& launch, int device, const Module& shared, unsigned seed) {
  const Shown shown(device);
  std::vector<unsigned> blocks(launch.grid.x);
  std::iota(blocks.begin(), blocks.end(), 0u);
  Random random(seed);
  for (std::size_t k = blocks.size(); seed != 0 && k > 1; --k) std::swap(blocks[k - 1], blocks[random.below(k)]);
  for (const unsigned index : blocks) {
    spoil(shared);
    const DynamicPart part(launch.shared);
    Block::of_this_thread().run(launch.body, launch.grid, launch.block, index, seed);
  }
}

}  // namespace

DynamicShared::DynamicShared(void* (*address)(), std::size_t bytes) { dynamic_arrays().push_back({address, bytes}); }

cudaError_t launch(Launch launch, cudaStream_t stream) {
  called("cudaLaunchKernel");
  const dim3 grid = launch.grid, block = launch.block;
  if (grid.x == 0 || grid.x > 0x7fffffffu || grid.y != 1 || grid.z != 1) return failed(cudaErrorInvalidConfiguration);
  if (block.x == 0 || block.x > kMostThreads || block.y != 1 || block.z != 1) {
    return failed(cudaErrorInvalidConfiguration);
  }
  if (launch.shared > kMostShared || launch.parameters > kMostParameters) return failed(cudaErrorInvalidValue);
  const int device = current_device("cudaLaunchKernel");
  // Measured: the first launch waits while any stream of the context waits, unless the kernel was loaded before.
  // Programming guide, "lazy loading": loading may need the whole context to be synchronized.
  if (!load(launch.kernel, device)) drain(device);
  count_launch();
  const Module shared = module_of(launch.kernel);
  put(
      stream, [launch = std::move(launch), device, shared, seed = order()] { run_grid(launch, device, shared, seed); },
      "cudaLaunchKernel");
  return cudaSuccess;
}

void set_image_error(int code) { loaded().image_error = code; }

}  // namespace on_cpu

// Measured: loads the kernel, and waits for nothing.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  using namespace on_cpu;
  called(__func__);
  if (loaded().image_error != 0) return failed(static_cast<cudaError_t>(loaded().image_error));
  load(kernel, current_device(__func__));
  *attributes = {};
  return cudaSuccess;
}
