// A device is memory that is not the host's, and queues on which work runs some time after the call that asked for it.
// All that the core does on a GPU goes through these classes, so it runs on whatever can do the same: a GPU
// (device/cuda), or a thread of this process (device/sim), which is what there is where nobody has a GPU.
//
// Nothing here waits for the device but what says so. Addresses of devices and of the host never overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "device/ticket.h"
#include "kernels/kernels.h"
#include "kernels/mix.h"
#include "kernels/unchanged.h"

namespace sordino {

// A queue of work, as the device's runtime calls it (a cudaStream_t). 0 is the runtime's default.
using Stream = std::uintptr_t;

// A place in a queue.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;  // whether all work before it is over; throws DeviceError if the device has failed
};

// Some tensors' addresses: row t has `width` of them, addresses[t * width] and so on, each of counts[t] elements.
struct Rows {
  std::size_t width;
  std::vector<std::byte*> addresses;
  std::vector<std::size_t> counts;
  std::size_t size() const { return counts.size(); }
};

// The kernels of kernels/kernels.h, mix.h and unchanged.h on device memory: the same results, bit for bit except for
// sums of squares and products, whose order of additions is another one (always the same). Each call puts its work on a
// queue and returns; what it was given as arrays of addresses it has read by then. Alignment is to elements at least.
// They throw what those throw, and DeviceError.
class Kernels {
 public:
  virtual ~Kernels() = default;

  // Of every row the first `sources` addresses are sources, all others destinations.
  virtual void reduce(ReduceOp op, DType type, const Rows& rows, std::size_t sources, double pre, double post,
                      Stream stream) = 0;
  // y = a * x + b * y; a row is (x, y).
  virtual void axpby(DType type, const Rows& rows, double a, double b, Stream stream) = 0;
  virtual void flatten(std::span<const kernels::Span> tensors, std::byte* flat, Stream stream) = 0;
  virtual void unflatten(const std::byte* flat, std::span<const kernels::Span> tensors, Stream stream) = 0;
  virtual void mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                   std::span<const kernels::Average> averages, std::size_t count, Stream stream) = 0;

  // results[3 t], [3 t + 1], [3 t + 2] = <x, x>, <x, y>, <y, y> of row t = (x, y). Results are doubles in memory that
  // the device reaches: its own, or pinned.
  virtual void dots(DType type, const Rows& rows, double* results, Stream stream) = 0;
  // results[t] = |x - y|^2 of row t = (x, y).
  virtual void squared_distances(DType type, const Rows& rows, double* results, Stream stream) = 0;
  // results[t] = |x| (2-norm) of row t = (x).
  virtual void norms(DType type, const Rows& rows, double* results, Stream stream) = 0;

  // kernels/unchanged.h. `counts` and all other arrays are device memory (or pinned).
  virtual void unchanged(const kernels::Items& items, const std::byte* now, std::byte* before, std::byte* counts,
                         int digits, std::byte* counters, Stream stream) = 0;
  virtual void draw(const kernels::Items& items, std::uint64_t key, std::byte* indices, Stream stream) = 0;
  virtual void select(const kernels::Items& items, const std::byte* counters, std::byte* indices, Stream stream) = 0;
  virtual void save_at(const kernels::Items& items, const std::byte* now, const std::byte* indices, std::byte* saved,
                       Stream stream) = 0;
  virtual void unchanged_at(const kernels::Items& items, const std::byte* now, const std::byte* saved,
                            const std::byte* indices, std::byte* counts, int digits, Stream stream) = 0;

  // One step of LARS (python/sordino/torch/lars.py) of row t = (weights, gradient, velocity), or (weights, gradient) if
  // momentum is 0: rates[t] is lr times the tensor's local rate. Computed in the dtype's stage (float; double).
  //   d = rates[t] * (gradient + decay * weights);  velocity = momentum * velocity + d
  //   weights -= velocity   (nesterov: weights -= d + momentum * velocity)
  struct LarsStep {
    double decay, momentum;
    bool nesterov;
  };
  virtual void lars_step(DType type, const Rows& rows, const double* rates, const LarsStep& how, Stream stream) = 0;
  // rates[t] = lr * (trust * w / (g + decay * w + eps) if scaled[t] and w > 0 and g > 0, else 1), where
  // w = weight_norms[t] and g = gradient_norms[t]. scaled: one byte a tensor, read before the call returns.
  struct LarsRates {
    double lr, trust, decay, eps;
  };
  virtual void lars_rates(const double* weight_norms, const double* gradient_norms,
                          std::span<const std::uint8_t> scaled, double* rates, const LarsRates& how, Stream stream) = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual int ordinal() const = 0;
  virtual std::string name() const = 0;
  // The same number for the same hardware in every process; never 0.
  virtual std::uint64_t identity() const = 0;
  virtual Kernels& kernels() = 0;
  // Makes this the calling thread's current device, as its runtime has it, until what is returned goes.
  virtual std::shared_ptr<void> use() = 0;
  // Whether NCCL works on its memory and queues.
  virtual bool takes_nccl() const = 0;
  // A queue of this library's own, beside those that compute; nothing on it waits for peers.
  virtual Stream queue() const = 0;
  // Further ones, for what does.
  virtual Stream make_queue() = 0;
  virtual void drop_queue(Stream queue) noexcept = 0;

  // Zeroed, and ready for any queue. TransportError when there is no room.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void free(std::byte* data) noexcept = 0;
  // Fills it with zeros, after what is on queue(); waits until that is done.
  virtual void clear(std::byte* data, std::size_t bytes) = 0;
  // Memory for a while: for what is put on a queue from now on, and free for others after what is on some queue when it
  // is given back.
  virtual std::byte* take(std::size_t bytes, Stream stream) = 0;
  virtual void give_back(std::byte* data, Stream stream) noexcept = 0;
  // Of memory from allocate(). The other process calls open() with it, and close() on what that returned; both throw
  // TransportError where the machine does not allow it.
  virtual Ticket share(const std::byte* data) = 0;
  virtual std::byte* open(const Ticket& ticket) = 0;
  virtual void close(std::byte* data) noexcept = 0;
  // Whether memory that was shared may be freed while another process still has it open.
  virtual bool frees_shared() const = 0;

  // Has copies to and from some host memory go straight, and kernels reach it; it must be unpinned before it goes.
  // False if the machine does not allow it: then copies work all the same, slower, and kernels do not.
  virtual bool pin(std::byte* data, std::size_t bytes) = 0;
  virtual void unpin(std::byte* data) noexcept = 0;

  virtual std::shared_ptr<Event> record(Stream stream) = 0;
  // On every queue that an event was ever recorded on.
  virtual std::vector<std::shared_ptr<Event>> record_all() = 0;
  // What is put on the queue from now on runs after the event.
  virtual void wait(Stream stream, const std::shared_ptr<Event>& event) = 0;
  // Between any two places, of this device or the host.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream) = 0;
};

}  // namespace sordino
