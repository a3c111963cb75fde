// A user's request, the handle of its operation, and its result.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "collectives/opcode.h"
#include "device/device.h"

namespace sordino {

// One tensor of a request: contiguous, row-major. `output` is null where the core allocates the result. Where the
// members' inputs determine the result's size, the core also allocates it if that size is not `output_bytes`.
struct Tensor {
  DType dtype;
  std::vector<std::int64_t> shape;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::size_t output_bytes = 0;

  std::size_t count() const { return count_of(shape); }
  std::size_t bytes() const { return count() * size_of(dtype); }
  std::size_t row_bytes() const { return size_of(dtype) * (shape.empty() ? 1 : count_of(std::span(shape).subspan(1))); }
};

struct Exchange;
class QueueBarrier;
class Handle;

// A process set to add, given by its world ranks, or to remove, given by its id.
struct SetChange {
  std::vector<int> ranks;
  int removed = 0;

  bool operator==(const SetChange&) const = default;
};

struct Request {
  std::string name;
  Opcode opcode = Opcode::kBarrier;
  int set = 0;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1, postscale = 1;
  int root = 0;                      // world rank; for operations with a root
  std::vector<Tensor> tensors;       // several: a grouped operation
  std::vector<std::int64_t> splits;  // rows for each member; for operations with splits
  SetChange set_change;              // for operations that add or remove a process set
  // For an exchange: its data, its round, and the operation that it comes after. On this rank the exchange begins when
  // that operation is done, and fails if that operation failed. So no thread has to wait in between.
  std::shared_ptr<const Exchange> exchange;
  std::uint64_t round = 0;
  std::shared_ptr<const Handle> after;
  // This rank only serves the other ranks. It waits for them without a deadline. If one leaves, only this request
  // fails, with PeerLost.
  bool serving = false;
  // On device memory: the request may complete for the ranks' threads before the devices have done its work.
  bool runs_ahead = false;
  // Device that owns the tensors' memory; null for the host. The tensors may be read and written after all events of
  // `ready`.
  std::shared_ptr<Device> device;
  std::vector<std::shared_ptr<Event>> ready;
};

// Memory for a result whose size only the operation knows.
struct Result {
  std::shared_ptr<std::byte> data;
  std::shared_ptr<Device> device;  // that owns the memory; null for the host
  std::shared_ptr<Stream> reader;  // on a device: the queue that reads it last
  std::size_t bytes = 0;
  std::vector<std::int64_t> shape;
};

// A request in flight. `error`, `results` and the members after them may be read once done() is true.
class Handle {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  void finish(std::exception_ptr failure = nullptr) {
    error = std::move(failure);
    done_.store(true, std::memory_order_release);
  }

  bool submitted = false;  // false for a promise, which has no operation; constant once other threads see it
  std::exception_ptr error;
  std::vector<Result> results;
  std::vector<std::int64_t> rows;  // received from each member, tensor by tensor; for operations that count them
  int last_rank = -1;              // rank that joined last (join)
  int set_id = 0;                  // of the new process set
  int source = -1;                 // for a receive: world rank that sent the message
  // For an operation on device memory: its results are valid after the event.
  std::shared_ptr<Device> device;
  std::shared_ptr<Event> event;
  std::weak_ptr<QueueBarrier> barrier;  // at which the devices met for it, if they did
  std::atomic<bool> undone{false};      // the work on the device was given up, and the results are invalid
  // The operation was given up while it ran. Other ranks may read and write its memory as long as they live.
  std::atomic<bool> given_up{false};

 private:
  std::atomic<bool> done_{false};
};

}  // namespace sordino
