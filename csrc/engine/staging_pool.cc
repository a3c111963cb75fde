#include "engine/staging_pool.h"

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

// A device may still use the buffer of an operation that was given up, or whose results no caller waited for.
StagingPool::~StagingPool() {
  Deadline limit(std::chrono::seconds(1));
  for (const auto& buffer : buffers_) {
    if (!over(*buffer, limit)) {
      leak_intentionally(buffer);  // the device may still use its memory
    } else if (buffer->pinned) {
      buffer->device->unpin(buffer->data());
    }
  }
}

bool StagingPool::over(const Buffer& buffer, Deadline& limit) {
  try {
    const auto event = buffer.taken ? buffer.device->record(buffer.queue) : buffer.busy;
    while (event && !event->done()) {
      if (limit.passed()) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  } catch (const Error&) {
    return false;  // the device has failed
  }
}

std::shared_ptr<StagingPool::Buffer> StagingPool::take(const std::shared_ptr<Device>& device, Where where,
                                                       std::size_t bytes, Stream queue) {
  constexpr std::size_t kLeast = std::size_t{64} << 10;
  const std::size_t room = std::bit_ceil(std::max(bytes, kLeast));
  for (const auto& buffer : buffers_) {
    if (buffer->taken || buffer->device != device || buffer->where != where || buffer->segment->bytes != room) continue;
    if (buffer->busy && buffer->queue != queue && !buffer->busy->done()) continue;
    buffer->taken = true;
    buffer->queue = queue;
    return buffer;
  }
  auto buffer = std::make_shared<Buffer>();
  buffer->device = device;
  buffer->where = where;
  buffer->queue = queue;
  if (where == Where::kDevice) {
    buffer->segment = memory_.allocate_on(device, room, Use::kNobody);
  } else {
    try {
      buffer->segment = memory_.allocate(room);
    } catch (const TransportError&) {
      buffer->segment = std::make_shared<PrivateSegment>(room);
    }
    buffer->pinned = device->pin(buffer->data(), room);
  }
  buffers_.push_back(buffer);
  return buffer;
}

void StagingPool::give_back(const std::shared_ptr<Buffer>& buffer, std::shared_ptr<Event> busy) {
  buffer->busy = std::move(busy);
  buffer->taken = false;
}

}  // namespace sordino
