// The data phase of collectives by NCCL, on device memory. As in operations.h, nobody checks what has been negotiated;
// and each is over when all its work is on the device's queue: the caller records an event there, and waits for that.
#pragma once

#include <memory>
#include <vector>

#include "collectives/pieces.h"
#include "progress/task.h"
#include "transport/nccl/communicator.h"

namespace sordino::nccl {

// A communicator with the device of this rank, and device memory that lasts from one operation to the next.
class Channel {
 public:
  // The communicator need not have connected: the operations wait for that.
  Channel(std::unique_ptr<Communicator> communicator, std::shared_ptr<Device> device)
      : communicator_(std::move(communicator)), device_(std::move(device)), stream_(device_->make_queue()) {}
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  // Closes the communicator. Memory that something may still be at work on is not freed.
  ~Channel();

  Communicator& communicator() { return *communicator_; }
  Device& device() { return *device_; }
  // Of its own: on one queue, operations of several communicators would wait for each other, in another order on each
  // rank.
  Stream stream() const { return stream_; }
  auto ready() {
    return until([this] { return communicator_->ready(); });
  }

  // Room for work that is put on the queue before the next call. Only while the communicator is ready.
  std::byte* scratch(std::size_t bytes);

 private:
  std::unique_ptr<Communicator> communicator_;
  std::shared_ptr<Device> device_;
  Stream stream_;
  std::byte* scratch_ = nullptr;
  std::size_t capacity_ = 0;
};

// Arguments are those of operations.h. Participants are the communicator's ranks; where a reduction is needed,
// supports(type, op) must hold. Averages are sums with a `post` of 1 / ranks: those that are nothing else go to NCCL's
// own, which divides before it adds. Several pieces travel as one, through scratch memory; more than `most` bytes take
// several calls.
inline constexpr std::size_t kMostAtOnce = std::size_t{256} << 20;
Task allreduce(Channel& channel, Pieces pieces, ReduceOp op, double pre, double post, std::size_t most = kMostAtOnce);
Task broadcast(Channel& channel, int root, const std::byte* input, std::byte* output, std::size_t bytes);
Task allgather(Channel& channel, const std::byte* input, std::vector<std::size_t> sizes, std::byte* output);
Task alltoall(Channel& channel, const std::byte* input, std::vector<std::size_t> send_sizes, std::byte* output,
              std::vector<std::size_t> receive_sizes);
Task reducescatter(Channel& channel, DType dtype, const std::byte* input, std::vector<std::size_t> bounds,
                   std::byte* output, ReduceOp op, double pre, double post);

}  // namespace sordino::nccl
