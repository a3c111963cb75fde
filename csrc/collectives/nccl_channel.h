// A communicator of NCCL with the device of this rank, and device memory that lasts from one operation to the next.
#pragma once

#include <memory>

#include "device/device.h"
#include "progress/task.h"
#include "transport/nccl/communicator.h"

namespace sordino::nccl {

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

}  // namespace sordino::nccl
