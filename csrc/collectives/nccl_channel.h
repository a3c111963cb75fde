// An NCCL communicator with this rank's device, and device memory that is kept from one operation to the next.
#pragma once

#include <memory>

#include "device/device.h"
#include "progress/task.h"
#include "transport/nccl/communicator.h"

namespace sordino::nccl {

class Channel {
 public:
  // The communicator need not be connected yet: operations wait for that.
  Channel(std::unique_ptr<Communicator> communicator, std::shared_ptr<Device> device)
      : communicator_(std::move(communicator)), device_(std::move(device)), queue_(make_owned_queue(device_)) {}
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  // Closes the communicator, frees the scratch memory, and drops the queue if nothing else refers to it. Leaks the
  // memory and the queue if unfinished work may still use them.
  ~Channel();

  Communicator& communicator() { return *communicator_; }
  Device& device() { return *device_; }
  // Its own queue. On a shared queue, operations of several communicators would wait for each other, in a different
  // order on each rank.
  Stream stream() const { return *queue_; }
  const OwnedQueue& queue() const { return queue_; }
  auto ready() {
    return until([this] { return communicator_->ready(); });
  }

  // Memory for work that is put on the queue before the next call. Call it only while the communicator is ready.
  std::byte* scratch(std::size_t bytes);

 private:
  // Waits for the work on the queue, for a limited time. False if it is not over then, or the device has failed.
  bool finished() const noexcept;

  std::unique_ptr<Communicator> communicator_;
  std::shared_ptr<Device> device_;
  OwnedQueue queue_;
  std::byte* scratch_ = nullptr;
  std::size_t capacity_ = 0;
};

}  // namespace sordino::nccl
