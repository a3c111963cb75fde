// Operations in Python: requests, and handles of their results.
#pragma once

#include <memory>

#include "bindings/bindings.h"
#include "bindings/device.h"
#include "collectives/exchange.h"
#include "engine/world.h"

namespace sordino::bindings {

// A request that may be submitted any number of times, one after the other. `keep` owns the memory of its tensors.
struct PyRequest {
  Request request;
  py::object keep;
  std::shared_ptr<PyDevice> device;  // the device that has this memory; null: host memory
};

// The common part of exchanges of one kind. `keep` owns the memory that is exchanged.
struct PyExchange {
  std::shared_ptr<const Exchange> exchange;
  int process_set;
  bool serving;
  py::object keep;
  std::shared_ptr<PyDevice> device;
};

// Handle. `keep`: objects that own the memory in use. If the handle is destroyed before the operation is over, if the
// operation was given up, or if the world has failed, they are never released: the memory may still be read or written.
struct PyHandle {
  std::shared_ptr<World> world;
  std::shared_ptr<Handle> handle;
  py::object keep;
  std::shared_ptr<PyDevice> device;
  std::vector<Stream> origins;  // queues of the device on which its tensors were computed

  PyHandle(std::shared_ptr<World> world, std::shared_ptr<Handle> handle, py::object keep,
           std::shared_ptr<PyDevice> device = nullptr, std::vector<Stream> origins = {})
      : world(std::move(world)),
        handle(std::move(handle)),
        keep(std::move(keep)),
        device(std::move(device)),
        origins(std::move(origins)) {}
  PyHandle(const PyHandle&) = delete;
  PyHandle& operator=(const PyHandle&) = delete;
  ~PyHandle();
  // True when nothing uses the memory any more.
  bool over() const { return handle->done() && (!handle->event || handle->event->done()); }
  // Waits for the operation, and throws its error. On a device, the caller's later work on its queue sees the results:
  // the thread waits for peers, not for the device.
  void wait();
  // The caller's queue on that device. UsageError if it is being captured, where waiting is impossible.
  Stream check_wait() const;
};

// Start an operation. With `wait` it is over on return; PyHandle::wait() raises its errors.
// `streams`: queues of the device on which the tensors were computed, besides the current one.
std::unique_ptr<PyHandle> start(std::shared_ptr<World> world, const PyRequest& what, bool wait,
                                std::vector<Stream> streams = {});
std::unique_ptr<PyHandle> start(std::shared_ptr<World> world, const PyExchange& what, std::string name,
                                std::uint64_t round, const PyHandle* after, bool wait);

}  // namespace sordino::bindings
