// Operations as Python holds them: what is asked for, and what becomes of it.
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
  std::shared_ptr<PyDevice> device;  // whose memory that is, if not the host's
};

// What exchanges of one kind have in common. `keep` owns the memory that is exchanged.
struct PyExchange {
  std::shared_ptr<const Exchange> exchange;
  int process_set;
  bool serving;
  py::object keep;
  std::shared_ptr<PyDevice> device;
};

// A handle. `keep` are the objects that own the memory under way; if the last reference to an unfinished handle goes,
// the operation was given up, or the world has failed, they are never released: the bytes may still be read or written.
struct PyHandle {
  std::shared_ptr<World> world;
  std::shared_ptr<Handle> handle;
  py::object keep;
  std::shared_ptr<PyDevice> device;
  Stream origin;  // the device's queue that it was submitted from

  PyHandle(std::shared_ptr<World> world, std::shared_ptr<Handle> handle, py::object keep,
           std::shared_ptr<PyDevice> device = nullptr, Stream origin = 0)
      : world(std::move(world)),
        handle(std::move(handle)),
        keep(std::move(keep)),
        device(std::move(device)),
        origin(origin) {}
  PyHandle(const PyHandle&) = delete;
  PyHandle& operator=(const PyHandle&) = delete;
  ~PyHandle();
  // Nobody works on the memory any more.
  bool over() const { return handle->done() && (!handle->event || handle->event->done()); }
  // On a device, what the caller computes from now on sees the results; its thread waits for peers, not for the device.
  void wait();
  // The caller's queue on that device. UsageError where nobody may wait: it is being captured.
  Stream check_wait() const;
};

// Starts them; with `wait` they are over on return, and errors are raised by PyHandle::wait().
std::unique_ptr<PyHandle> start(std::shared_ptr<World> world, const PyRequest& what, bool wait);
std::unique_ptr<PyHandle> start(std::shared_ptr<World> world, const PyExchange& what, std::string name,
                                std::uint64_t round, const PyHandle* after, bool wait);

}  // namespace sordino::bindings
