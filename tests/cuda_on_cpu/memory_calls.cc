// CUDA's functions for memory.
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "control.h"
#include "memory.h"
#include "queues.h"

struct CUpool_st {
  int device;
};

using namespace on_cpu;

extern "C" {

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  called(__func__);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;  // measured: null, and no error
  *data = allocate(bytes, false, current_device(__func__));
  if (*data == nullptr) return failed(cudaErrorMemoryAllocation);
  fill(static_cast<std::byte*>(*data), true);
  return cudaSuccess;
}

// Measured: waits while any stream of the context waits.
cudaError_t cudaFree(void* data) {
  called(__func__);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (data == nullptr) return cudaSuccess;
  drain(current_device(__func__));
  discard(static_cast<std::byte*>(data), false, false);
  return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* wanted) {
  called(__func__);
  const bool ours = wanted->allocType == cudaMemAllocationTypePinned &&
                    wanted->location.type == cudaMemLocationTypeDevice && wanted->location.id < device_count();
  if (!ours) return failed(cudaErrorInvalidValue);
  *pool = new CUpool_st{wanted->location.id};
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  called(__func__);
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) {
  called(__func__);
  return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  called(__func__);
  *data = nullptr;
  if (pool->device != current_device(__func__)) fault("a pool of another device than the current one");
  if (bytes == 0) return cudaSuccess;  // measured: null, and no error
  std::byte* found = allocate(bytes, true, current_device(__func__));
  if (found == nullptr) return failed(cudaErrorMemoryAllocation);
  put(stream, [found] { fill(found, true); }, __func__);
  *data = found;
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  called(__func__);
  put(stream, [data] { discard(static_cast<std::byte*>(data), true, false); }, __func__);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  called(__func__);
  if (where(data, bytes, __func__) == Where::kPageable && !pretends()) return failed(cudaErrorInvalidValue);
  put(
      stream,
      [=, device = current_device(__func__)] {
        const Shown shown(device);
        std::memset(data, value, bytes);
      },
      __func__);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  called(__func__);
  where(to, bytes, __func__);
  // API reference, "API synchronization behavior": pageable memory is copied to a staging buffer immediately.
  if (where(from, bytes, __func__) == Where::kPageable && !pretends()) {
    const auto* first = static_cast<const std::byte*>(from);
    put(
        stream,
        [to, staged = std::make_shared<std::vector<std::byte>>(first, first + bytes)] {
          const Shown shown(Shown::kAll);
          std::memcpy(to, staged->data(), staged->size());
        },
        __func__);
  } else {
    put(
        stream,
        [=] {
          const Shown shown(Shown::kAll);
          std::memcpy(to, from, bytes);
        },
        __func__);
  }
  return cudaSuccess;
}

// API reference: for the beginning of a block of cudaMalloc.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  called(__func__);
  current_device(__func__);
  Ticket ticket;
  if (!share(static_cast<const std::byte*>(data), ticket)) return failed(cudaErrorInvalidValue);
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &ticket, sizeof ticket);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned flags) {
  called(__func__);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return failed(cudaErrorInvalidValue);
  Ticket ticket;
  std::memcpy(&ticket, &handle, sizeof ticket);
  // CUDA refuses a handle of the same process.
  if (ticket.process == getpid() && !pretends()) return failed(cudaErrorDeviceUninitialized);
  *data = open_shared(ticket, current_device(__func__));
  return *data != nullptr ? cudaSuccess : failed(cudaErrorInvalidValue);
}

// Unmaps the memory, so it waits as cudaFree does. (Not measured.)
cudaError_t cudaIpcCloseMemHandle(void* data) {
  called(__func__);
  drain(current_device(__func__));
  discard(static_cast<std::byte*>(data), false, true);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  called(__func__);
  current_device(__func__);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  const bool done = register_host(static_cast<std::byte*>(data), bytes);
  return done ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}

// Measured: waits while any stream of the context waits.
cudaError_t cudaHostUnregister(void* data) {
  called(__func__);
  drain(current_device(__func__));
  return unregister_host(static_cast<std::byte*>(data)) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

}  // extern "C"
