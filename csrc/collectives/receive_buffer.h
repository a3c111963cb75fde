// Memory for values of other nodes, or for staging, kept from one operation to the next.
#pragma once

#include <memory>

#include "device/device.h"
#include "transport/node_memory.h"

namespace sordino {

class ReceiveBuffer {
 public:
  explicit ReceiveBuffer(NodeMemory& memory) : memory_(memory) {}
  // Room for `copies` copies of `bytes` bytes each, on the device, or on the host if `device` is null. With `shared`,
  // the node maps host memory. Earlier contents may be lost.
  std::byte* reserve(std::size_t copies, std::size_t bytes, bool shared, const std::shared_ptr<Device>& device);
  std::byte* data() const { return segment_ ? segment_->data : private_.get(); }
  std::size_t bytes() const { return bytes_; }
  // Null if no peer maps the memory.
  const std::shared_ptr<Segment>& segment() const { return segment_; }

 private:
  NodeMemory& memory_;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<std::byte[]> private_;
  std::shared_ptr<Device> device_;
  std::size_t bytes_ = 0;
};

}  // namespace sordino
