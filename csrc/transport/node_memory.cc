#include "transport/node_memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include "base/error.h"

namespace sordino {
namespace {

// A copy keeps its thread from polling. So larger private data take another way, in pieces.
constexpr std::size_t kMostPrivate = std::size_t{64} << 20;

}  // namespace

// Pool of device memory. Peers may keep a block mapped until the end, so blocks are freed only with the pool.
class NodeMemory::Pool : public std::enable_shared_from_this<Pool> {
 public:
  explicit Pool(std::shared_ptr<SegmentTable> table) : table_(std::move(table)) {}
  ~Pool() {
    for (Block& block : free_) {
      if (block.openers) {
        block.device->free_when_unused(block.data, [openers = std::move(block.openers)] {
          return reinterpret_cast<const Openers*>(openers->data)->none();
        });
      } else {
        block.device->free(block.data);
      }
    }
  }

  std::shared_ptr<Segment> take(NodeMemory& memory, const std::shared_ptr<Device>& device, std::size_t bytes, Use use) {
    std::optional<Block> block = find(device, bytes, use);
    if (!block) {
      block = allocate(memory, device, bytes, use);
    } else {
      if (use == Use::kCaller) device->synchronize();  // work of its last user may still run, on any stream
      device->clear(block->data, block->bytes);
    }
    return std::make_shared<OnDevice>(shared_from_this(), std::move(*block), bytes);
  }

 private:
  struct Block {
    std::shared_ptr<Device> device;
    Use use;
    std::byte* data;
    std::size_t bytes;
    std::shared_ptr<Segment> openers;  // its list of openers; null if it cannot be shared
  };

  class OnDevice : public Segment {
   public:
    OnDevice(std::shared_ptr<Pool> pool, Block block, std::size_t wanted)
        : pool_(std::move(pool)), block_(std::move(block)) {
      data = block_.data;
      bytes = wanted;
    }
    ~OnDevice() override {
      std::lock_guard lock(pool_->mutex_);
      pool_->free_.push_back(std::move(block_));
    }

   private:
    std::shared_ptr<Pool> pool_;
    Block block_;
  };

  Block allocate(NodeMemory& memory, const std::shared_ptr<Device>& device, std::size_t bytes, Use use) {
    // CUDA may place several smaller blocks in one allocation, and another process can open only a whole allocation.
    constexpr std::size_t kGrain = std::size_t{2} << 20;
    Block block{device, use, nullptr, (bytes + kGrain - 1) / kGrain * kGrain, nullptr};
    block.data = device->allocate(block.bytes);
    try {
      Location location;
      location.ticket = device->share(block.data);
      location.device = device->identity();
      block.openers = memory.allocate(sizeof(Openers));
      const Location list = table_->locate(block.openers->data, sizeof(Openers));
      location.openers = list.segment;
      location.key = list.key;
      location.file = list.file;
      table_->add(block.data, block.bytes, location);
    } catch (const TransportError&) {
      // This machine does not let processes share device memory, so the table does not list the block.
    }
    return block;
  }

  // Finds the smallest free block of at least `bytes` and at most twice the larger of `bytes` and kLeast.
  std::optional<Block> find(const std::shared_ptr<Device>& device, std::size_t bytes, Use use) {
    std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      const bool fits = block->device == device && block->use == use && block->bytes >= bytes &&
                        block->bytes / 2 <= std::max(bytes, kLeast);
      if (fits && (best == free_.end() || block->bytes < best->bytes)) best = block;
    }
    if (best == free_.end()) return std::nullopt;
    Block found = std::move(*best);
    free_.erase(best);
    return found;
  }

  static constexpr std::size_t kLeast = std::size_t{2} << 20;
  std::shared_ptr<SegmentTable> table_;
  std::mutex mutex_;
  std::vector<Block> free_;
};

NodeMemory::NodeMemory() : pool_(std::make_shared<Pool>(table_)) {}

NodeMemory::NodeMemory(const NodeMemory& below) : table_(below.table_), pool_(below.pool_) {}

NodeMemory::~NodeMemory() { close_devices(); }

void NodeMemory::close_devices() noexcept {
  for (auto& [place, mapping] : mapped_) {
    mapping.device->close(mapping.data);
    Openers::leave(mapping.entry);
  }
  mapped_.clear();
}

std::shared_ptr<Segment> NodeMemory::adopt(std::byte*, std::size_t, int) {
  throw TransportError("the ranks of this node cannot map memory that another library has allocated");
}

std::shared_ptr<Segment> NodeMemory::allocate_on(const std::shared_ptr<Device>& device, std::size_t bytes, Use use) {
  return pool_->take(*this, device, std::max<std::size_t>(bytes, 1), use);
}

bool NodeMemory::offers_private(const void*, std::size_t, Sure) const { return false; }

Location NodeMemory::offer(const void* data, std::size_t bytes, Sure sure) {
  const Location shared = locate(data, bytes);
  if (shared.segment != 0 || bytes > kMostPrivate || !offers_private(data, bytes, sure)) return shared;
  return {.segment = Location::kPrivate, .bytes = bytes, .key = reinterpret_cast<std::uint64_t>(data)};
}

void NodeMemory::copy(int rank, const Location& location, std::span<std::byte> to) {
  if (location.offset > location.bytes || location.bytes - location.offset < to.size())
    throw TransportError("rank " + std::to_string(rank) + " offers memory beyond the end of a segment");
  if (location.segment == Location::kPrivate) return read_private(rank, location.key + location.offset, to);
  if (!to.empty()) std::memcpy(to.data(), map(rank, location), to.size());
}

void NodeMemory::read_private(int rank, std::uint64_t, std::span<std::byte>) {
  throw TransportError("rank " + std::to_string(rank) + " offers memory that this rank cannot reach");
}

std::byte* NodeMemory::map(int rank, const Location& location, const std::shared_ptr<Device>& device) {
  if (location.offset > location.bytes)
    throw TransportError("rank " + std::to_string(rank) + " offers memory beyond the end of a segment");
  if (location.segment == Location::kPrivate)
    throw TransportError("rank " + std::to_string(rank) + " offers private memory to be mapped");
  if (location.device == 0) return map_host(rank, location);
  if (!device)
    throw TransportError("rank " + std::to_string(rank) + " offers device memory to a rank without a device");
  const std::tuple place(rank, location.segment, device->identity());
  auto found = mapped_.find(place);
  if (found == mapped_.end()) {
    const Location list{
        .segment = location.openers, .bytes = sizeof(Openers), .key = location.key, .file = location.file};
    auto* entry = reinterpret_cast<Openers*>(map_host(rank, list))->enter();
    try {
      found = mapped_.emplace(place, Mapping{device, device->open(location.ticket), entry}).first;
    } catch (...) {
      Openers::leave(entry);
      throw;
    }
  }
  return found->second.data + location.offset;
}

}  // namespace sordino
