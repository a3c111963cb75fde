// Arena: flat memory for the tensors of a layout, which the ranks of a node can share.
#pragma once

#include <memory>

#include "arena/layout.h"
#include "transport/transport.h"

namespace sordino {

class Arena {
 public:
  // Allocates memory of `device`, or of the host if it is null. Throws TransportError if there is no room.
  Arena(Layout layout, NodeMemory& memory, const std::shared_ptr<Device>& device = nullptr)
      : layout_(std::move(layout)),
        memory_(device ? memory.allocate_on(device, layout_.bytes()) : memory.allocate(layout_.bytes())) {}

  const Layout& layout() const { return layout_; }
  const std::shared_ptr<Segment>& memory() const { return memory_; }
  std::byte* tensor(std::size_t index) const { return memory_->data + layout_.offsets().at(index); }

 private:
  Layout layout_;
  std::shared_ptr<Segment> memory_;
};

}  // namespace sordino
