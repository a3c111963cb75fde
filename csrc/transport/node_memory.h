// Memory that the ranks of one node share. Host memory is shared in each transport's own way, and device memory in the
// same way with all transports. The allocation functions and locate() may be called from any thread.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "device/device.h"
#include "transport/location.h"
#include "transport/openers.h"
#include "transport/segment_table.h"

namespace sordino {

// Memory of this rank that its node peers may map. Released with the last reference.
class Segment {
 public:
  virtual ~Segment() = default;
  // Provides memory for the first `end` bytes of a segment of allocate_sparse(). Call it before a rank uses them.
  // Throws TransportError if the machine has too little memory. Called by one thread at a time.
  virtual void reserve(std::size_t end) { static_cast<void>(end); }
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// Work that may still use a segment of device memory when it is released: the caller's, on any stream, or none.
enum class Use { kCaller, kNobody };

class NodeMemory {
 public:
  NodeMemory();
  virtual ~NodeMemory();
  NodeMemory& operator=(const NodeMemory&) = delete;

  // Returns zeroed, page-aligned memory. Throws TransportError if the machine has too little memory.
  virtual std::shared_ptr<Segment> allocate(std::size_t bytes) = 0;
  // The same, but only the first `reserved` bytes have memory. Segment::reserve() provides memory for more bytes.
  virtual std::shared_ptr<Segment> allocate_sparse(std::size_t bytes, std::size_t reserved) = 0;
  // Offers memory of another library to the peers. `data` is a shared mapping of the first `bytes` bytes of the file
  // `fd`. The library keeps both until the segment is released. Throws TransportError if peers cannot map such memory.
  virtual std::shared_ptr<Segment> adopt(std::byte* data, std::size_t bytes, int fd);
  // Allocates on a device, as allocate() does on the host. Released memory is kept for later segments of the same
  // device and use, until this object and all its segments are gone. It is then freed once no peer has it mapped.
  std::shared_ptr<Segment> allocate_on(const std::shared_ptr<Device>& device, std::size_t bytes,
                                       Use use = Use::kCaller);

  // Location of [data, data + bytes), if it lies within one live segment of this rank; else {}.
  Location locate(const void* data, std::size_t bytes) { return table_->locate(data, bytes); }
  // Address, in this process, of `location` in the memory of `rank`, a rank of this node. Maps the memory on first use.
  // `device` accesses the memory; null for host memory. Throws TransportError if the memory cannot be mapped.
  std::byte* map(int rank, const Location& location, const std::shared_ptr<Device>& device = nullptr);

  // kYes: offer() asks the kernel whether it can copy private memory, which takes half a microsecond. It cannot copy
  // memory of devices, for example.
  enum class Sure { kYes, kNo };
  // Location from which peers can copy(): that of locate(), or of private memory, if this node copies from that;
  // else {}. The caller keeps the data unchanged until peers have copied them.
  Location offer(const void* data, std::size_t bytes, Sure sure = Sure::kYes);
  // Copies the bytes at `location` in the memory of `rank`, a rank of this node. Throws TransportError as map() does,
  // MemoryGone if the process of the rank has ended, and NotCopied if the kernel cannot copy the bytes.
  void copy(int rank, const Location& location, std::span<std::byte> to);
  // Whether peers can copy this private memory.
  virtual bool offers_private(const void* data, std::size_t bytes, Sure sure) const;

  // Ids of the segments freed since the last call. Send them to the node peers, which then call unmap().
  std::vector<std::uint64_t> take_freed() { return table_->take_freed(); }
  void unmap(int rank, std::uint64_t segment) { unmap_host(rank, segment); }

 protected:
  // Shares the segments of `below`, for a transport that numbers ranks differently.
  NodeMemory(const NodeMemory& below);

  virtual std::byte* map_host(int rank, const Location& location) = 0;
  virtual void unmap_host(int rank, std::uint64_t segment) = 0;
  // Copies from `address` in the process of `rank`.
  virtual void read_private(int rank, std::uint64_t address, std::span<std::byte> to);
  // Closes mapped device memory. Call it before peers' host memory is unmapped, because the lists of openers are there.
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
