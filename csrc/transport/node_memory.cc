#include "transport/node_memory.h"

#include <algorithm>
#include <mutex>

#include "base/error.h"

namespace sordino {

// Blocks of device memory. A peer may have one mapped until the end, so none is freed before.
class NodeMemory::Pool : public std::enable_shared_from_this<Pool> {
 public:
  explicit Pool(std::shared_ptr<SegmentTable> table) : table_(std::move(table)) {}
  ~Pool() {
    for (const Block& block : free_) {
      if (block.device->frees_shared() || table_->locate(block.data, 1).segment == 0) block.device->free(block.data);
    }
  }

  std::shared_ptr<Segment> take(const std::shared_ptr<Device>& device, std::size_t bytes) {
    Block block = find(device, bytes);
    if (block.data == nullptr) {
      // Smaller pieces may share an allocation with others, and only whole ones can be told to another process.
      constexpr std::size_t kGrain = std::size_t{2} << 20;
      block = {device, nullptr, (bytes + kGrain - 1) / kGrain * kGrain, {}};
      block.data = device->allocate(block.bytes);
      try {
        Location location;
        location.ticket = device->share(block.data);
        location.device = device->identity();
        table_->add(block.data, block.bytes, location);
      } catch (const TransportError&) {
        // This machine does not let processes share it: then it lies in no segment.
      }
    } else {
      device->clear(block.data, block.bytes);
    }
    return std::make_shared<OnDevice>(shared_from_this(), std::move(block), bytes);
  }

 private:
  struct Block {
    std::shared_ptr<Device> device;
    std::byte* data;
    std::size_t bytes;
    std::vector<std::shared_ptr<Event>> busy;  // until then somebody's queue may work on what it was
  };

  class OnDevice : public Segment {
   public:
    OnDevice(std::shared_ptr<Pool> pool, Block block, std::size_t wanted)
        : pool_(std::move(pool)), block_(std::move(block)) {
      data = block_.data;
      bytes = wanted;
    }
    ~OnDevice() override {
      try {
        block_.busy = block_.device->record_all();
      } catch (const Error&) {
        return;  // the device has failed
      }
      std::lock_guard lock(pool_->mutex_);
      pool_->free_.push_back(std::move(block_));
    }

   private:
    std::shared_ptr<Pool> pool_;
    Block block_;
  };

  // The smallest free block that will do without wasting more than it holds.
  Block find(const std::shared_ptr<Device>& device, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      const bool fits = block->device == device && block->bytes >= bytes &&
                        block->bytes / 2 <= std::max(bytes, kLeast) && is_idle(*block);
      if (fits && (best == free_.end() || block->bytes < best->bytes)) best = block;
    }
    if (best == free_.end()) return {device, nullptr, 0, {}};
    Block found = std::move(*best);
    free_.erase(best);
    return found;
  }

  static bool is_idle(const Block& block) {
    return std::all_of(block.busy.begin(), block.busy.end(), [](const auto& event) { return event->done(); });
  }

  static constexpr std::size_t kLeast = std::size_t{2} << 20;
  std::shared_ptr<SegmentTable> table_;
  std::mutex mutex_;
  std::vector<Block> free_;
};

NodeMemory::NodeMemory() : pool_(std::make_shared<Pool>(table_)) {}

NodeMemory::NodeMemory(const NodeMemory& below) : table_(below.table_), pool_(below.pool_) {}

NodeMemory::~NodeMemory() {
  for (auto& [place, mapping] : mapped_) mapping.device->close(mapping.data);
}

std::shared_ptr<Segment> NodeMemory::allocate_on(const std::shared_ptr<Device>& device, std::size_t bytes) {
  return pool_->take(device, std::max<std::size_t>(bytes, 1));
}

std::byte* NodeMemory::map(int rank, const Location& location, const std::shared_ptr<Device>& device) {
  if (location.offset > location.bytes)
    throw TransportError("rank " + std::to_string(rank) + " offers memory beyond the end of a segment");
  if (location.device == 0) return map_host(rank, location);
  if (!device)
    throw TransportError("rank " + std::to_string(rank) + " offers device memory to a rank without a device");
  const std::tuple place(rank, location.segment, device->identity());
  auto found = mapped_.find(place);
  if (found == mapped_.end()) found = mapped_.emplace(place, Mapping{device, device->open(location.ticket)}).first;
  return found->second.data + location.offset;
}

}  // namespace sordino
