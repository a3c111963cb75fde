// A GPU by the CUDA runtime, which is linked statically: without a driver there are simply no devices.
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "base/error.h"
#include "device/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/current.cuh"

namespace sordino::cuda {
namespace {

using kernels::cuda::check;
using kernels::cuda::cuda_stream;
using kernels::cuda::Current;

class CudaEvent : public Event {
 public:
  explicit CudaEvent(cudaStream_t stream) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
    const cudaError_t code = cudaEventRecord(event_, stream);
    if (code == cudaSuccess) return;
    cudaEventDestroy(event_);
    check(code, "cudaEventRecord");
  }
  ~CudaEvent() override { cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  bool done() override {
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
  cudaEvent_t event_ = nullptr;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int ordinal) : ordinal_(ordinal) {
    const Current current(ordinal_);
    check(cudaGetDeviceProperties(&properties_, ordinal_), "cudaGetDeviceProperties");
    queue_ = cuda_stream(make_queue());
    cudaMemPoolProps wanted{};
    wanted.allocType = cudaMemAllocationTypePinned;
    wanted.location = {cudaMemLocationTypeDevice, ordinal_};
    check(cudaMemPoolCreate(&pool_, &wanted), "cudaMemPoolCreate");
    std::uint64_t kept = std::uint64_t{256} << 20;  // for the next operation; torch wants the rest
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &kept), "cudaMemPoolSetAttribute");
    int never = 0;  // have what communicates wait for what computes, for the sake of memory
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolReuseAllowInternalDependencies, &never), "cudaMemPoolSetAttribute");
    kernels_ = kernels::cuda::make(ordinal_);
  }

  int ordinal() const override { return ordinal_; }
  std::string name() const override {
    return std::string(properties_.name) + " (cuda:" + std::to_string(ordinal_) + ")";
  }
  std::uint64_t identity() const override {
    // FNV-1a of the UUID, which is the same in all processes; ordinals depend on CUDA_VISIBLE_DEVICES.
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const char byte : properties_.uuid.bytes) {
      hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
    }
    return hash | 1;
  }
  Kernels& kernels() override { return *kernels_; }
  std::shared_ptr<void> use() override { return std::make_shared<Current>(ordinal_); }
  bool takes_nccl() const override { return true; }
  Stream queue() const override { return reinterpret_cast<Stream>(queue_); }
  Stream make_queue() override {
    const Current current(ordinal_);
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t made = nullptr;
    // Ahead of what computes: peers wait for it. Not ordered with the default stream, which would block it.
    check(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
    return reinterpret_cast<Stream>(made);
  }
  void drop_queue(Stream queue) noexcept override {
    {
      std::lock_guard lock(mutex_);
      seen_.erase(queue);
    }
    static_cast<void>(cudaStreamDestroy(cuda_stream(queue)));
  }

  std::byte* allocate(std::size_t bytes) override {
    const Current current(ordinal_);
    void* data = nullptr;
    check<TransportError>(cudaMalloc(&data, bytes), no_room(bytes));
    clear(static_cast<std::byte*>(data), bytes);
    return static_cast<std::byte*>(data);
  }
  void free(std::byte* data) noexcept override {
    if (data != nullptr) cudaFree(data);
    cudaGetLastError();  // at the end of a process the runtime may be gone before its memory
  }
  std::byte* take(std::size_t bytes, Stream stream) override {
    const Current current(ordinal_);
    void* data = nullptr;
    cudaError_t code = cudaMallocFromPoolAsync(&data, bytes, pool_, cuda_stream(stream));
    if (code == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      static_cast<void>(cudaMemPoolTrimTo(pool_, 0));
      code = cudaMallocFromPoolAsync(&data, bytes, pool_, cuda_stream(stream));
    }
    check<TransportError>(code, no_room(bytes));
    return static_cast<std::byte*>(data);
  }
  void give_back(std::byte* data, Stream stream) noexcept override {
    try {
      const Current current(ordinal_);
      check(cudaFreeAsync(data, cuda_stream(stream)), "cudaFreeAsync");
    } catch (const Error&) {
      // The device has failed, or the process ends.
    }
  }
  void clear(std::byte* data, std::size_t bytes) override {
    const Current current(ordinal_);
    check(cudaMemsetAsync(data, 0, bytes, queue_), "cudaMemsetAsync");
    check(cudaStreamSynchronize(queue_), "cudaStreamSynchronize");
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
    try {
      const Current current(ordinal_);
      check(cudaIpcCloseMemHandle(data), "cudaIpcCloseMemHandle");
    } catch (const Error&) {
      // The device has failed, or the process ends.
    }
  }
  bool frees_shared() const override { return false; }  // undefined while another process has it open

  bool pin(std::byte* data, std::size_t bytes) override {
    const Current current(ordinal_);
    // Kernels are to write there, by the address that the host has for it.
    int same_address = 0;
    check(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal_),
          "cudaDeviceGetAttribute");
    if (same_address == 0) return false;
    const cudaError_t code = cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    cudaGetLastError();
    return code == cudaSuccess;
  }
  void unpin(std::byte* data) noexcept override {
    cudaHostUnregister(data);
    cudaGetLastError();
  }

  std::shared_ptr<Event> record(Stream stream) override {
    const Current current(ordinal_);
    {
      std::lock_guard lock(mutex_);
      seen_.insert(stream);
    }
    return std::make_shared<CudaEvent>(cuda_stream(stream));
  }
  std::vector<std::shared_ptr<Event>> record_all() override {
    std::set<Stream> streams;
    {
      std::lock_guard lock(mutex_);
      streams = seen_;
    }
    std::vector<std::shared_ptr<Event>> events;
    for (const Stream stream : streams) events.push_back(record(stream));
    return events;
  }
  void wait(Stream stream, const std::shared_ptr<Event>& event) override {
    const Current current(ordinal_);
    const auto& recorded = static_cast<const CudaEvent&>(*event);
    check(cudaStreamWaitEvent(cuda_stream(stream), recorded.native(), 0), "cudaStreamWaitEvent");
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream) override {
    if (bytes == 0) return;
    const Current current(ordinal_);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda_stream(stream)), "cudaMemcpyAsync");
  }

 private:
  std::string no_room(std::size_t bytes) const {
    return "no room for " + std::to_string(bytes) + " bytes on " + name();
  }

  const int ordinal_;
  std::mutex mutex_;
  std::set<Stream> seen_;
  cudaDeviceProp properties_{};
  cudaMemPool_t pool_ = nullptr;
  cudaStream_t queue_ = nullptr;  // lives as long as the process, as this object does
  std::unique_ptr<Kernels> kernels_;
};

}  // namespace

int count() {
  int found = 0;
  const cudaError_t code = cudaGetDeviceCount(&found);
  cudaGetLastError();
  return code == cudaSuccess ? found : 0;
}

std::shared_ptr<Device> make_device(int ordinal) {
  const int found = count();
  if (ordinal < 0 || ordinal >= found) {
    throw DeviceError("there is no GPU number " + std::to_string(ordinal) + ": CUDA finds " + std::to_string(found) +
                      " (see nvidia-smi, and CUDA_VISIBLE_DEVICES)");
  }
  static std::mutex mutex;
  // Never destroyed: at the end of the process the driver may go first.
  static auto* devices = new std::map<int, std::shared_ptr<Device>>;
  std::lock_guard lock(mutex);
  std::shared_ptr<Device>& device = (*devices)[ordinal];
  if (!device) device = std::make_shared<CudaDevice>(ordinal);
  return device;
}

}  // namespace sordino::cuda
