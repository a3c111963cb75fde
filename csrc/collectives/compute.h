// Interface for computing on the memory of an operation. On the host, the thread that runs the operation computes at
// once. A device computes later, on a queue. So each algorithm is written once for all kinds of memory.
#pragma once

#include <memory>
#include <span>

#include "base/dtype.h"
#include "device/device.h"
#include "kernels/kernels.h"
#include "kernels/mix.h"
#include "progress/task.h"

namespace sordino {

// Each function starts work and returns an Until. Once that is over, all work started so far is over, and any thread or
// rank may read the memory. With Waits::kForNothing, this holds only for later work on the same queue.
class Compute {
 public:
  virtual ~Compute() = default;

  // The device that owns the memory; null for the host.
  virtual const std::shared_ptr<Device>& device() const = 0;
  // The kernels of kernels/kernels.h and kernels/mix.h.
  virtual Until reduce(ReduceOp op, DType type, std::span<const std::byte* const> sources,
                       std::span<std::byte* const> destinations, std::size_t count, double pre, double post) = 0;
  virtual Until flatten(std::span<const kernels::Span> tensors, std::byte* flat) = 0;
  virtual Until unflatten(const std::byte* flat, std::span<const kernels::Span> tensors) = 0;
  virtual Until mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                    std::span<const kernels::Average> averages, std::size_t count) = 0;
  // Memory that lives as long as a reference to it. Until idle() is over, only this object may use it. Throws
  // TransportError if there is no room.
  virtual std::shared_ptr<std::byte> scratch(std::size_t bytes) = 0;
  // Is over once all work started so far is over.
  virtual Until idle() = 0;

  Until scale(DType type, std::byte* data, std::size_t count, double factor) {
    const std::byte* const source = data;
    return reduce(ReduceOp::kSum, type, {&source, 1}, {&data, 1}, count, factor, 1);
  }
  Until copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    const kernels::Span whole{const_cast<std::byte*>(from), bytes};
    return flatten({&whole, 1}, to);
  }
};

// The instance for the host's memory.
Compute& host_compute();
// The Until of a device's functions waits for the device (kForDevice), so that other ranks may read the memory next. Or
// it waits for nothing (kForNothing), because all later work is on the same queue.
enum class Waits { kForDevice, kForNothing };
// Returns an instance that computes on this queue of the device.
std::unique_ptr<Compute> device_compute(std::shared_ptr<Device> device, OwnedQueue queue, Waits waits);

// Is over once the event is done.
inline Until reached(std::shared_ptr<Event> event) {
  return until([event = std::move(event)] { return event->done(); });
}

}  // namespace sordino
