#include "collectives/staging.h"

#include <algorithm>
#include <bit>
#include <thread>

#include "base/error.h"
#include "base/keep.h"

namespace sordino {
namespace {

class PrivateSegment : public Segment {
 public:
  explicit PrivateSegment(std::size_t size) : memory_(std::make_unique_for_overwrite<std::byte[]>(size)) {
    data = memory_.get();
    bytes = size;
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
};

}  // namespace

// A device may still work on a block: of an operation that was given up, or whose results nobody has waited for.
Staging::~Staging() {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (const auto& block : blocks_) {
    if (!over(*block, limit)) {
      keep_for_ever(block);  // rather than pull the memory from under it
    } else if (block->pinned) {
      block->device->unpin(block->data());
    }
  }
}

bool Staging::over(const Block& block, std::chrono::steady_clock::time_point limit) {
  try {
    const auto event = block.taken ? block.device->record(block.device->queue()) : block.busy;
    while (event && !event->done()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  } catch (const Error&) {
    return false;  // the device has failed
  }
}

std::shared_ptr<Staging::Block> Staging::take(const std::shared_ptr<Device>& device, Where where, std::size_t bytes) {
  constexpr std::size_t kLeast = std::size_t{64} << 10;
  const std::size_t room = std::bit_ceil(std::max(bytes, kLeast));
  for (const auto& block : blocks_) {
    if (block->taken || block->device != device || block->where != where || block->segment->bytes != room) continue;
    if (block->busy && !block->busy->done()) continue;
    block->taken = true;
    return block;
  }
  auto block = std::make_shared<Block>();
  block->device = device;
  block->where = where;
  if (where == Where::kDevice) {
    block->segment = memory_.allocate_on(device, room);
  } else {
    try {
      block->segment = memory_.allocate(room);
    } catch (const TransportError&) {
      block->segment = std::make_shared<PrivateSegment>(room);
    }
    block->pinned = device->pin(block->data(), room);
  }
  blocks_.push_back(block);
  return block;
}

void Staging::give_back(const std::shared_ptr<Block>& block, std::shared_ptr<Event> busy) {
  block->busy = std::move(busy);
  block->taken = false;
}

}  // namespace sordino
