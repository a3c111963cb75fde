// Staging buffers for operations on device memory: pinned host memory, or device memory that node peers map. Kept from
// one operation to the next, because pinning, allocating and mapping take longer than most operations.
#pragma once

#include <memory>
#include <vector>

#include "base/awake_clock.h"
#include "device/device.h"
#include "transport/node_memory.h"

namespace sordino {

enum class Where { kHost, kDevice };

class StagingPool {
 public:
  // One buffer, taken until it is given back.
  struct Buffer {
    std::shared_ptr<Segment> segment;
    std::shared_ptr<Device> device;  // copies to and from it, or owns its memory
    Where where = Where::kHost;
    bool pinned = false;
    bool taken = true;
    Stream queue = 0;             // queue of the device that uses it
    std::shared_ptr<Event> busy;  // other queues get the buffer only after this event
    std::byte* data() const { return segment->data; }
  };

  explicit StagingPool(NodeMemory& memory) : memory_(memory) {}
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool();

  // Takes a buffer of at least `bytes`, for work on one queue of the device. Earlier work on that queue may still use
  // it, so the host must wait for the queue before it reads or writes the buffer. Host memory is shared with the node
  // if there is enough shared memory, else private.
  std::shared_ptr<Buffer> take(const std::shared_ptr<Device>& device, Where where, std::size_t bytes, Stream queue);
  // Gives a buffer back. The device is done with it after the event.
  void give_back(const std::shared_ptr<Buffer>& buffer, std::shared_ptr<Event> busy);

 private:
  static bool over(const Buffer& buffer, Deadline& limit);

  NodeMemory& memory_;
  std::vector<std::shared_ptr<Buffer>> buffers_;
};

}  // namespace sordino
