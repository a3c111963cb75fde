// Who computes on the memory that an operation moves, and when that is done: the thread that runs the operation, at
// once, or a device, some time later. So every algorithm is written once, whatever its memory.
#pragma once

#include <memory>
#include <span>

#include "base/dtype.h"
#include "device/device.h"
#include "kernels/kernels.h"
#include "kernels/mix.h"
#include "progress/task.h"

namespace sordino {

// Each function begins something, and the memory it is about may be read by anybody once what it returns is over. What
// was begun earlier is over by then, too. (By anybody who comes behind it on the same queue, where nobody waits.)
class Compute {
 public:
  virtual ~Compute() = default;

  // Whose memory it is; null for the host's.
  virtual const std::shared_ptr<Device>& device() const = 0;
  // As of kernels/kernels.h and mix.h.
  virtual Until reduce(ReduceOp op, DType type, std::span<const std::byte* const> sources,
                       std::span<std::byte* const> destinations, std::size_t count, double pre, double post) = 0;
  virtual Until flatten(std::span<const kernels::Span> tensors, std::byte* flat) = 0;
  virtual Until unflatten(const std::byte* flat, std::span<const kernels::Span> tensors) = 0;
  virtual Until mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                    std::span<const kernels::Average> averages, std::size_t count) = 0;
  // Memory for as long as somebody holds it; for others than this object once idle() is over.
  virtual std::shared_ptr<std::byte> scratch(std::size_t bytes) = 0;
  // Over when all that was begun is.
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

// The one of the host's memory.
Compute& host_compute();
// What the caller of a device's functions is to wait for: the device, before it goes on to what others read; or
// nothing, where all that comes behind is on the same queue.
enum class Waits { kForDevice, kForNothing };
// On one of the device's queues.
std::unique_ptr<Compute> device_compute(std::shared_ptr<Device> device, Stream stream, Waits waits);

// Over when the event is.
inline Until reached(std::shared_ptr<Event> event) {
  return until([event = std::move(event)] { return event->done(); });
}

}  // namespace sordino
