// A request of the user's, the handle of its operation, and the result.
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

// One tensor of a request: contiguous, row-major. `output` is null where the core allocates the result (allgather,
// alltoall, reducescatter).
struct Tensor {
  DType dtype;
  std::vector<std::int64_t> shape;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;

  std::size_t count() const { return count_of(shape); }
  std::size_t bytes() const { return count() * size_of(dtype); }
  std::size_t row_bytes() const { return size_of(dtype) * (shape.empty() ? 1 : count_of(std::span(shape).subspan(1))); }
};

struct Exchange;
class QueueBarrier;
class Handle;

// A process set to be made, of these world ranks, or to be removed, by its id.
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
  int root = 0;                      // world rank, of a broadcast
  std::vector<Tensor> tensors;       // several: a grouped operation
  std::vector<std::int64_t> splits;  // rows for each member, of an all-to-all
  SetChange set_change;              // of operations that add or remove a process set
  // Of an exchange: what is exchanged, in which round, and what it comes after: on this rank it begins when that is
  // done, and fails if that failed, so nobody need wait in between.
  std::shared_ptr<const Exchange> exchange;
  std::uint64_t round = 0;
  std::shared_ptr<const Handle> after;
  // This rank only serves the others: it waits for them without a deadline, and when one has left instead of coming,
  // this request alone fails with PeerLost.
  bool serving = false;
  // Of device memory: it may be over for the threads of its ranks before the devices have done it.
  bool runs_ahead = false;
  // Whose memory the tensors are; null for the host's. They may be read, and written, after `ready`.
  std::shared_ptr<Device> device;
  std::shared_ptr<Event> ready;
};

// Memory for a result whose size only the operation knows.
struct Result {
  std::shared_ptr<std::byte> data;
  std::shared_ptr<Device> device;  // whose memory it is, if not the host's
  std::shared_ptr<Stream> reader;  // then, the queue that reads it last
  std::size_t bytes = 0;
  std::vector<std::int64_t> shape;
};

// A request under way. `error`, `results` and what follows them may be read once done() is true.
class Handle {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  void finish(std::exception_ptr failure = nullptr) {
    error = std::move(failure);
    done_.store(true, std::memory_order_release);
  }

  bool submitted = false;  // it belongs to an operation, and is not a promise; does not change once others see it
  std::exception_ptr error;
  std::vector<Result> results;
  std::vector<std::int64_t> rows;  // that came from each member, tensor by tensor (all-gather, all-to-all)
  int last_rank = -1;              // that has joined (join)
  int set_id = 0;                  // of the new process set
  // Of an operation on device memory: its results are there after the event.
  std::shared_ptr<Device> device;
  std::shared_ptr<Event> event;
  std::weak_ptr<QueueBarrier> barrier;  // by which devices have met for it, if they have
  std::atomic<bool> undone{false};      // what was put on the device was given up, and the results are nothing
  // It was given up because of a lost rank: those that live may still read and write its memory, for as long as they
  // do.
  std::atomic<bool> given_up{false};

 private:
  std::atomic<bool> done_{false};
};

}  // namespace sordino
