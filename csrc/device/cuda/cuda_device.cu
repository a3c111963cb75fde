// A GPU, through the CUDA runtime. The runtime is linked statically, and finds no devices if there is no driver. This
// file is part of libsordino_cuda.so, which loader.cc opens and which exports one function.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>

#include "base/error.h"
#include "device/block_cache.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/obstacles.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/current.cuh"

namespace sordino::cuda {
namespace {

using kernels::cuda::check;
using kernels::cuda::cuda_stream;
using kernels::cuda::Current;

// Runs a clean-up, without throwing. The device may have failed, or the process may end before its work on the GPU.
template <class Work>
void attempt(int ordinal, const Work& work) noexcept {
  try {
    const Current current(ordinal);
    check(work(), "cleaning up");
  } catch (const std::exception&) {
    // The resources are lost with the device.
  }
}

// The first kernel that is loaded: shows whether this build has any kernels for this GPU.
__global__ void is_there() {}

// unloadable() has the same numbers as this CUDA.
static_assert(cudaErrorInvalidDeviceFunction == 98 && cudaErrorInvalidKernelImage == 200 &&
              cudaErrorNoKernelImageForDevice == 209 && cudaErrorInvalidPtx == 218 &&
              cudaErrorJitCompilerNotFound == 221 && cudaErrorUnsupportedPtxVersion == 222 &&
              cudaErrorJitCompilationDisabled == 223);

// The variable is CUDA's: CUDA reads it when a process first uses a GPU, and allows n = 1 to 32 queues. On an H100 with
// driver 580, n waiting queues blocked all other queues of the process, at every priority; n - 1 blocked none.
int queues_of_a_process() {
  constexpr int kDefault = 8, kMost = 32;
  const char* set = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const int number = set == nullptr ? kDefault : std::atoi(set);
  return number < 1 ? kDefault : std::min(number, kMost);
}

// Driver calls for words (numbers in pinned memory), in the form that CUDA 12 introduced.
struct Words {
  CUresult (*write)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);
  CUresult (*wait)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);
  CUresult (*attribute)(int*, CUdevice_attribute, CUdevice);
};

const Words& words() {
  static const Words found = [] {
    constexpr unsigned int kSince = 12000;
    Words all{};
    kernels::cuda::find_in_driver("cuStreamWriteValue64", all.write, kSince);
    kernels::cuda::find_in_driver("cuStreamWaitValue64", all.wait, kSince);
    kernels::cuda::find_in_driver("cuDeviceGetAttribute", all.attribute);
    return all;
  }();
  return found;
}

void check_driver(CUresult code, const char* call) {
  if (code != CUDA_SUCCESS) throw DeviceError(std::string(call) + ": error " + std::to_string(code) + " of the driver");
}

class CudaEvent : public Event {
 public:
  CudaEvent(int ordinal, cudaStream_t stream) : ordinal_(ordinal) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
    const cudaError_t code = cudaEventRecord(event_, stream);
    if (code == cudaSuccess) return;
    cudaEventDestroy(event_);
    check(code, "cudaEventRecord");
  }
  ~CudaEvent() override {
    attempt(ordinal_, [this] { return cudaEventDestroy(event_); });
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  bool done() override {
    const Current current(ordinal_);
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(code, "the GPU failed while Sordino waited for it");
    return true;
  }
  cudaEvent_t native() const { return event_; }

 private:
  const int ordinal_;
  cudaEvent_t event_ = nullptr;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int ordinal) : ordinal_(ordinal) {
    const Current current(ordinal_);
    check(cudaGetDeviceProperties(&properties_, ordinal_), "cudaGetDeviceProperties");
    require_kernels();
    queue_ = cuda_stream(make_queue());
    clearing_ = cuda_stream(make_queue());
    waits_for_words_ = has(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
    flush_ = has(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) ? CU_STREAM_WAIT_VALUE_FLUSH : 0;
    make_pool();
    kernels_ = kernels::cuda::make(ordinal_, {[this](std::size_t bytes, Stream stream) { return take(bytes, stream); },
                                              [this](std::byte* data, Stream stream) { give_back(data, stream); }});
  }

  int ordinal() const override { return ordinal_; }
  std::string name() const override {
    return std::string(properties_.name) + " (cuda:" + std::to_string(ordinal_) + ")";
  }
  // FNV-1a hash of the machine's boot id and the GPU's place on the bus. Ordinals depend on CUDA_VISIBLE_DEVICES.
  // Slices of one GPU (MIG) have different UUIDs, but NCCL treats them as one GPU.
  std::uint64_t identity() const override {
    std::string place;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> place;
    for (const int part : {properties_.pciDomainID, properties_.pciBusID, properties_.pciDeviceID})
      place += std::to_string(part) + ":";
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const char byte : place) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
    return hash | 1;
  }
  Kernels& kernels() override { return *kernels_; }
  std::shared_ptr<void> use() override { return std::make_shared<Current>(ordinal_); }
  bool capturing(Stream stream) override {
    const Current current(ordinal_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(cuda_stream(stream), &status);
    if (code == cudaErrorStreamCaptureImplicit) {  // the legacy stream: work on it would join another graph
      static_cast<void>(cudaGetLastError());
      return true;
    }
    check(code, "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  bool takes_nccl() const override { return true; }
  Stream queue() const override { return reinterpret_cast<Stream>(queue_); }
  Stream make_queue() override {
    const Current current(ordinal_);
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t made = nullptr;
    // Higher priority than queues that compute, because peers wait for it. Not ordered with the default stream, which
    // would block it.
    check(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
    return reinterpret_cast<Stream>(made);
  }
  void drop_queue(Stream queue) noexcept override {
    attempt(ordinal_, [=] { return cudaStreamDestroy(cuda_stream(queue)); });
  }

  void free(std::byte* data) noexcept override {
    attempt(ordinal_, [=] { return cudaFree(data); });
  }
  void give_back(std::byte* data, Stream stream) noexcept override {
    if (pool_ == nullptr) return cache_.give_back(data, stream);
    attempt(ordinal_, [=] { return cudaFreeAsync(data, cuda_stream(stream)); });
  }
  void clear(std::byte* data, std::size_t bytes) override {
    const Current current(ordinal_);
    check(cudaMemsetAsync(data, 0, bytes, clearing_), "cudaMemsetAsync");
    check(cudaStreamSynchronize(clearing_), "cudaStreamSynchronize");
  }

  Ticket share(const std::byte* data) override {
    static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(Ticket));
    const Current current(ordinal_);
    cudaIpcMemHandle_t handle;
    check<TransportError>(cudaIpcGetMemHandle(&handle, const_cast<std::byte*>(data)), "cudaIpcGetMemHandle");
    Ticket ticket;
    std::memcpy(ticket.data(), &handle, sizeof(handle));
    return ticket;
  }
  std::byte* open(const Ticket& ticket) override {
    const Current current(ordinal_);
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, ticket.data(), sizeof(handle));
    void* data = nullptr;
    check<TransportError>(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return static_cast<std::byte*>(data);
  }
  void close(std::byte* data) noexcept override {
    attempt(ordinal_, [=] { return cudaIpcCloseMemHandle(data); });
  }

  bool pin(std::byte* data, std::size_t bytes) override {
    const Current current(ordinal_);
    // Kernels use the host's address of the memory.
    int same_address = 0;
    check(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal_),
          "cudaDeviceGetAttribute");
    if (same_address == 0) return false;
    const cudaError_t code = cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    cudaGetLastError();
    return code == cudaSuccess;
  }
  void unpin(std::byte* data) noexcept override {
    attempt(ordinal_, [=] { return cudaHostUnregister(data); });
  }

  std::shared_ptr<Event> record(Stream stream) override {
    const Current current(ordinal_);
    return std::make_shared<CudaEvent>(ordinal_, cuda_stream(stream));
  }
  void synchronize() override {
    const Current current(ordinal_);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void wait(Stream stream, const std::shared_ptr<Event>& event) override {
    const Current current(ordinal_);
    const auto& recorded = static_cast<const CudaEvent&>(*event);
    check(cudaStreamWaitEvent(cuda_stream(stream), recorded.native(), 0), "cudaStreamWaitEvent");
  }
  bool waits_for_words() const override { return waits_for_words_; }
  // The driver puts a system-wide fence between earlier work on the queue and the write.
  void write_word(std::atomic<std::uint64_t>& word, std::uint64_t value, Stream stream) override {
    const Current current(ordinal_);
    check_driver(words().write(cuda_stream(stream), address_of(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
                 "cuStreamWriteValue64");
  }
  void wait_for_word(std::atomic<std::uint64_t>& word, std::uint64_t least, Stream stream) override {
    const Current current(ordinal_);
    check_driver(words().wait(cuda_stream(stream), address_of(word), least, CU_STREAM_WAIT_VALUE_GEQ | flush_),
                 "cuStreamWaitValue64");
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream) override {
    if (bytes == 0) return;
    const Current current(ordinal_);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda_stream(stream)), "cudaMemcpyAsync");
  }

 protected:
  int hardware_queues() const override { return hardware_queues_; }
  std::byte* try_allocate(std::size_t bytes) override {
    std::byte* data = try_malloc(bytes);
    if (data != nullptr) clear(data, bytes);
    return data;
  }
  std::byte* try_take(std::size_t bytes, Stream stream) override {
    if (pool_ == nullptr) return cache_.take(bytes, stream);
    const Current current(ordinal_);
    void* data = nullptr;
    const cudaError_t code = cudaMallocFromPoolAsync(&data, bytes, pool_, cuda_stream(stream));
    if (!lacks_room(code, "cudaMallocFromPoolAsync")) return static_cast<std::byte*>(data);
    static_cast<void>(cudaMemPoolTrimTo(pool_, 0));
    return nullptr;
  }

 private:
  // Some virtual GPUs have no memory pools.
  void make_pool() {
    int supported = 0;
    check(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, ordinal_), "cudaDeviceGetAttribute");
    if (supported == 0) return;
    cudaMemPoolProps wanted{};
    wanted.allocType = cudaMemAllocationTypePinned;
    wanted.location = {cudaMemLocationTypeDevice, ordinal_};
    check(cudaMemPoolCreate(&pool_, &wanted), "cudaMemPoolCreate");
    std::uint64_t kept = std::uint64_t{256} << 20;  // bytes kept for later operations; PyTorch needs the rest
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &kept), "cudaMemPoolSetAttribute");
    int never = 0;  // communication must not wait for computation in order to save memory
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolReuseAllowInternalDependencies, &never), "cudaMemPoolSetAttribute");
  }
  // Returns null if there is no room.
  std::byte* try_malloc(std::size_t bytes) const {
    const Current current(ordinal_);
    void* data = nullptr;
    return lacks_room(cudaMalloc(&data, bytes), "cudaMalloc") ? nullptr : static_cast<std::byte*>(data);
  }
  // Devices use the host's addresses of memory that pin() accepts.
  static CUdeviceptr address_of(const std::atomic<std::uint64_t>& word) {
    static_assert(sizeof(word) == sizeof(cuuint64_t));
    return reinterpret_cast<CUdeviceptr>(&word);
  }
  bool has(CUdevice_attribute attribute) const {
    CUdevice device = 0;
    int value = 0;
    check_driver(kernels::cuda::driver().device(&device, ordinal_), "cuDeviceGet");
    return words().attribute(&value, attribute, device) == CUDA_SUCCESS && value != 0;
  }
  static bool lacks_room(cudaError_t code, const char* call) {
    if (code != cudaErrorMemoryAllocation) check(code, call);
    static_cast<void>(cudaGetLastError());
    return code == cudaErrorMemoryAllocation;
  }
  void require_kernels() const {
    cudaFuncAttributes attributes{};
    const cudaError_t code = cudaFuncGetAttributes(&attributes, is_there);
    if (const std::string why = unloadable(code); !why.empty()) {
      static_cast<void>(cudaGetLastError());
      throw NotBuilt(no_kernels_for(name(), properties_.major, properties_.minor, SORDINO_CUDA_DESCRIPTION, why));
    }
    check(code, "loading Sordino's kernels");
  }

  const int ordinal_;
  cudaDeviceProp properties_{};
  cudaMemPool_t pool_ = nullptr;  // null: the device has no pools, and temporary memory comes from cache_
  BlockCache cache_{*this, [this](std::size_t bytes) { return try_malloc(bytes); },
                    [this](std::byte* data) { free(data); }};
  cudaStream_t queue_ = nullptr, clearing_ = nullptr;  // live as long as the process, like this object
  const int hardware_queues_ = queues_of_a_process();
  bool waits_for_words_ = false;
  // Flag for waits. Without it, data that a peer's GPU wrote before a word may become visible after the word.
  unsigned int flush_ = 0;
  std::unique_ptr<Kernels> kernels_;
};

int count_gpus() {
  int found = 0;
  const cudaError_t code = cudaGetDeviceCount(&found);
  cudaGetLastError();
  return code == cudaSuccess ? found : 0;
}

std::string find_obstacle() {
  int found = 0, driver = 0, runtime = 0;
  const cudaError_t code = cudaGetDeviceCount(&found);
  static_cast<void>(cudaGetLastError());
  if (code == cudaSuccess && found > 0) return "";
  if (code == cudaErrorInsufficientDriver) {
    static_cast<void>(cudaDriverGetVersion(&driver));
    static_cast<void>(cudaRuntimeGetVersion(&runtime));
    return driver_too_old(driver, runtime);
  }
  const std::string why = code == cudaSuccess ? "" : std::string(" (") + cudaGetErrorString(code) + ")";
  return "CUDA finds no GPU" + why + ": see nvidia-smi, and CUDA_VISIBLE_DEVICES";
}

std::shared_ptr<Device> make_gpu(int ordinal) {
  if (const std::string why = find_obstacle(); !why.empty()) throw DeviceError(why);
  const int found = count_gpus();
  if (ordinal < 0 || ordinal >= found) {
    throw DeviceError("there is no GPU number " + std::to_string(ordinal) + ": CUDA finds " + std::to_string(found) +
                      " (see nvidia-smi, and CUDA_VISIBLE_DEVICES)");
  }
  static std::mutex mutex;
  // Never destroyed, because the driver may be unloaded first at the end of the process.
  static auto* devices = new std::map<int, std::shared_ptr<Device>>;
  std::lock_guard lock(mutex);
  std::shared_ptr<Device>& device = (*devices)[ordinal];
  if (!device) device = std::make_shared<CudaDevice>(ordinal);
  return device;
}

}  // namespace
}  // namespace sordino::cuda

extern "C" __attribute__((visibility("default"))) const sordino::cuda::Plugin* sordino_cuda_plugin() {
  namespace cuda = sordino::cuda;
  static const cuda::Plugin plugin{SORDINO_CUDA_DESCRIPTION, &cuda::count_gpus, &cuda::find_obstacle, &cuda::make_gpu};
  return &plugin;
}
