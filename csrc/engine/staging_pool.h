// Memory that an operation on device memory passes through: the host's, pinned, or a device's that node peers map.
// Kept from one operation to the next, since to pin, to allocate and to map takes longer than most operations.
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
  // One place, taken until it is given back.
  struct Buffer {
    std::shared_ptr<Segment> segment;
    std::shared_ptr<Device> device;  // that copies to and from it, or whose memory it is
    Where where = Where::kHost;
    bool pinned = false;
    bool taken = true;
    Stream queue = 0;             // on which it does
    std::shared_ptr<Event> busy;  // until then, others wait
    std::byte* data() const { return segment->data; }
  };

  explicit StagingPool(NodeMemory& memory) : memory_(memory) {}
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool();

  // At least so many bytes, for work on one queue of the device. Host memory is shared with the node where there is
  // room for that.
  std::shared_ptr<Buffer> take(const std::shared_ptr<Device>& device, Where where, std::size_t bytes, Stream queue);
  // The device is done with it after the event.
  void give_back(const std::shared_ptr<Buffer>& buffer, std::shared_ptr<Event> busy);

 private:
  static bool over(const Buffer& buffer, Deadline& limit);

  NodeMemory& memory_;
  std::vector<std::shared_ptr<Buffer>> buffers_;
};

}  // namespace sordino
