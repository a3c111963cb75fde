// Memory that the ranks of one node share: the host's, which each transport finds its own way to, and that of devices,
// which is the same for all of them. The allocation functions and locate() may be called from any thread.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "device/device.h"
#include "transport/location.h"
#include "transport/openers.h"
#include "transport/segment_table.h"

namespace sordino {

// Memory that this rank owns and its node peers may map. Freed with the last reference.
class Segment {
 public:
  virtual ~Segment() = default;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// Who may still work on device memory when it goes: the caller, on streams that nobody else knows, or nobody.
enum class Use { kCaller, kNobody };

class NodeMemory {
 public:
  NodeMemory();
  virtual ~NodeMemory();
  NodeMemory& operator=(const NodeMemory&) = delete;

  // Zeroed, page aligned. Throws TransportError when the machine has no room for it.
  virtual std::shared_ptr<Segment> allocate(std::size_t bytes) = 0;
  // The same on a device. Memory that goes there is kept for the next of the same use, until the last of this object
  // and its memory goes; then it is freed as soon as no peer has it mapped.
  std::shared_ptr<Segment> allocate_on(const std::shared_ptr<Device>& device, std::size_t bytes,
                                       Use use = Use::kCaller);

  // Where [data, data + bytes) lies, if it lies in one live segment of this rank; else {}.
  Location locate(const void* data, std::size_t bytes) { return table_->locate(data, bytes); }
  // The address, in this process, of what `rank` (on this node) calls `location`. Mapped on first use. Device memory
  // needs the device that is to reach it. TransportError if it cannot be mapped.
  std::byte* map(int rank, const Location& location, const std::shared_ptr<Device>& device = nullptr);

  // Segments freed since the last call, to be told to the node peers; they then call unmap.
  std::vector<std::uint64_t> take_freed() { return table_->take_freed(); }
  void unmap(int rank, std::uint64_t segment) { unmap_host(rank, segment); }

 protected:
  // Of the same segments, for whoever gives ranks other numbers.
  NodeMemory(const NodeMemory& below);

  virtual std::byte* map_host(int rank, const Location& location) = 0;
  virtual void unmap_host(int rank, std::uint64_t segment) = 0;
  // Before the host's memory of peers is unmapped for good: who has opened their devices' memory is listed there.
  void close_devices() noexcept;

  std::shared_ptr<SegmentTable> table_ = std::make_shared<SegmentTable>();

 private:
  class Pool;
  struct Mapping {
    std::shared_ptr<Device> device;
    std::byte* data;
    Openers::Entry* entry;
  };
  std::shared_ptr<Pool> pool_;
  std::map<std::tuple<int, std::uint64_t, std::uint64_t>, Mapping> mapped_;  // by rank, segment, and device
};

}  // namespace sordino
