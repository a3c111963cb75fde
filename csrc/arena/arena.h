// Flat memory for a layout, in memory that the ranks of the node share, handing out the place of each tensor.
#pragma once

#include <memory>

#include "arena/layout.h"
#include "transport/transport.h"

namespace sordino {

class Arena {
 public:
  // Throws TransportError when the machine has no shared memory left for it.
  Arena(Layout layout, NodeMemory& memory) : layout_(std::move(layout)), memory_(memory.allocate(layout_.bytes())) {}

  const Layout& layout() const { return layout_; }
  const std::shared_ptr<Segment>& memory() const { return memory_; }
  std::byte* tensor(std::size_t index) const { return memory_->data + layout_.offsets().at(index); }

 private:
  Layout layout_;
  std::shared_ptr<Segment> memory_;
};

}  // namespace sordino
