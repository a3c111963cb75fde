// Several tensors as one contiguous buffer. A single tensor needs no buffer: its output is used.
#pragma once

#include <memory>

#include "collectives/compute.h"
#include "collectives/pieces.h"

namespace sordino {

class Flat {
 public:
  Flat(Compute& compute, const Pieces& pieces) : compute_(compute), pieces_(pieces) {
    if (pieces.all().size() != 1) scratch_ = compute_.scratch(pieces.bytes());
  }
  std::byte* data() { return scratch_ ? scratch_.get() : pieces_.all().front().output; }

  Task begin(double pre) {
    if (data() != pieces_.all().front().input) co_await compute_.flatten(pieces_.inputs(), data());
    if (pre != 1) co_await compute_.scale(pieces_.dtype(), data(), pieces_.count(), pre);
  }
  Task finish(double post) {
    if (post != 1) co_await compute_.scale(pieces_.dtype(), data(), pieces_.count(), post);
    if (scratch_) co_await compute_.unflatten(data(), pieces_.outputs());
  }

 private:
  Compute& compute_;
  const Pieces& pieces_;
  std::shared_ptr<std::byte> scratch_;
};

}  // namespace sordino
