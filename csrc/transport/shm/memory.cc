#include "transport/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "base/limits.h"
#include "base/system_error.h"

namespace sordino::shm {
namespace {

// Kernels before 6.10 undo a whole reservation that a signal interrupts. So a reservation that takes longer than the
// time between two signals never ends. This size takes some milliseconds.
constexpr std::size_t kSlice = std::size_t{16} << 20;
constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kBlock = 512;  // unit of st_blocks
#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;
#endif

// A sparse segment takes memory in steps of this size, so that it grows only a few times.
constexpr std::size_t kStep = std::size_t{64} << 10;

// Empty if the kernel could still give `size` bytes, which the caller is about to take; else the reason. Reading the
// limits takes longer than making a small segment. So a recent reading is reused while it leaves kMuch more than that.
std::string lacks(std::size_t size) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kRecent{100};
  constexpr std::size_t kMuch = std::size_t{256} << 20;
  static std::mutex mutex;
  static Limits::Available left{};
  static Clock::time_point looked;
  std::lock_guard lock(mutex);
  const auto now = Clock::now();
  if (now - looked > kRecent || left.bytes < kMuch || left.bytes - kMuch < size) {
    left = Limits().available_memory();
    looked = now;
  }
  if (left.bytes < size) return std::to_string(left.bytes) + " are available in " + left.of;
  left.bytes -= size;
  return {};
}

// Location of the beginning of a file, by which peers open it. SegmentTable::add() adds the number of the segment.
Location location_of(int fd) {
  struct stat file{};
  if (fstat(fd, &file) != 0) throw TransportError("no shared memory behind a file descriptor: " + explained(errno));
  Location location;
  location.key = static_cast<std::uint64_t>(fd);
  location.file = file.st_ino;
  return location;
}

class MemfdSegment : public Segment {
 public:
  MemfdSegment(std::shared_ptr<SegmentTable> table, std::size_t size, std::size_t reserved) : table_(std::move(table)) {
    bytes = size;
    fd_ = memfd_create("sordino", MFD_CLOEXEC);
    if (fd_ < 0) throw TransportError("memfd_create failed: " + explained(errno));
    const bool whole = reserved >= size;
    try {
      if (ftruncate(fd_, static_cast<off_t>(size)) != 0) throw no_room(size, explained(errno));
      give_memory(std::min(reserved, size));
      void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | (whole ? MAP_POPULATE : 0), fd_, 0);
      if (address == MAP_FAILED)
        throw TransportError("cannot map a shared segment of " + std::to_string(size) + " bytes: " + explained(errno));
      data = static_cast<std::byte*>(address);
    } catch (...) {
      close(fd_);
      throw;
    }
    table_->add(data, size, location_of(fd_));
  }
  ~MemfdSegment() override {
    table_->remove(data);
    munmap(data, bytes);
    close(fd_);
  }
  void reserve(std::size_t end) override {
    if (end <= reserved_) return;
    const std::size_t begin = reserved_ / kPage * kPage;
    give_memory(std::min((end + kStep - 1) / kStep * kStep, bytes));
    // Saves a fault per page. Kernels before 5.14 refuse it.
    static_cast<void>(madvise(data + begin, reserved_ - begin, MADV_POPULATE_WRITE));
  }

 private:
  static TransportError no_room(std::size_t size, const std::string& why) {
    return TransportError("no room for " + std::to_string(size) + " bytes of shared memory: " + why);
  }
  void give_memory(std::size_t end) {
    const std::size_t size = end - reserved_;
    // A memfd has no size limit of its own. Reserving more than is available would not fail, but trigger the
    // out-of-memory killer.
    if (const std::string why = lacks(size); !why.empty()) throw no_room(size, why);
    // Reserving the pages now turns "no memory left" into an error here instead of a SIGBUS at the first write.
    if (const int error = shm::reserve(fd_, reserved_, end); error != 0) throw no_room(size, explained(error));
    reserved_ = end;
  }

  std::shared_ptr<SegmentTable> table_;
  int fd_;
  std::size_t reserved_ = 0;  // bytes at the beginning that have memory
};

// Memory that another owner has mapped from a file.
class AdoptedSegment : public Segment {
 public:
  AdoptedSegment(std::shared_ptr<SegmentTable> table, std::byte* mapped, std::size_t size, int fd)
      : table_(std::move(table)) {
    data = mapped;
    bytes = size;
    table_->add(data, bytes, location_of(fd));
  }
  ~AdoptedSegment() override { table_->remove(data); }

 private:
  std::shared_ptr<SegmentTable> table_;
};

}  // namespace

int reserve(int fd, std::size_t begin, std::size_t end, const std::function<int(int, off_t, off_t)>& allocate) {
  for (std::size_t at = begin; at < end;) {
    const std::size_t slice = std::min(kSlice, end - at);
    const int error = allocate(fd, static_cast<off_t>(at), static_cast<off_t>(slice));
    if (error == 0) {
      at += slice;
    } else if (failing_of(error) != Failing::kAgain) {
      return error;
    }
  }
  return 0;
}

std::shared_ptr<Segment> ShmMemory::allocate(std::size_t bytes) {
  const std::size_t size = std::max<std::size_t>(bytes, 1);
  return std::make_shared<MemfdSegment>(table_, size, size);
}

std::shared_ptr<Segment> ShmMemory::allocate_sparse(std::size_t bytes, std::size_t reserved) {
  return std::make_shared<MemfdSegment>(table_, bytes, reserved);
}

std::shared_ptr<Segment> ShmMemory::adopt(std::byte* data, std::size_t bytes, int fd) {
  return std::make_shared<AdoptedSegment>(table_, data, bytes, fd);
}

std::byte* ShmMemory::map_host(int rank, const Location& location) {
  auto& segments = mapped_[rank];
  auto found = segments.find(location.segment);
  if (found == segments.end()) {
    const auto pid = pids_.find(rank);
    if (pid == pids_.end()) throw TransportError("rank " + std::to_string(rank) + " is not on this node");
    const std::string path = "/proc/" + std::to_string(pid->second) + "/fd/" + std::to_string(location.key);
    const std::string whose = path + " of rank " + std::to_string(rank);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
      const int error = errno;
      if (failing_of(error) == Failing::kGone) throw MemoryGone(whose + " is gone: " + explained(error), rank);
      throw TransportError("cannot open " + whose + ": " + explained(error));
    }
    struct stat file{};
    const bool known = fstat(fd, &file) == 0;
    if (!known || file.st_ino != location.file || static_cast<std::uint64_t>(file.st_size) < location.bytes) {
      close(fd);
      if (known && file.st_ino != location.file) throw MemoryGone(whose + " is another file by now", rank);
      throw TransportError(whose + " is smaller than the rank announced");
    }
    // Populating the mapping of a sparse segment would allocate all of it.
    const bool whole = static_cast<std::uint64_t>(file.st_blocks) * kBlock >= location.bytes;
    void* address =
        mmap(nullptr, location.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (whole ? MAP_POPULATE : 0), fd, 0);
    const std::string why = address == MAP_FAILED ? explained(errno) : "";
    close(fd);
    if (address == MAP_FAILED) throw TransportError("cannot map " + whose + ": " + why);
    found = segments.emplace(location.segment, Mapping{static_cast<std::byte*>(address), location.bytes}).first;
  }
  if (location.offset > found->second.bytes)
    throw TransportError("rank " + std::to_string(rank) + " offers memory beyond the end of a segment");
  return found->second.data + location.offset;
}

void ShmMemory::unmap_host(int rank, std::uint64_t segment) {
  auto& segments = mapped_[rank];
  auto found = segments.find(segment);
  if (found == segments.end()) return;
  munmap(found->second.data, found->second.bytes);
  segments.erase(found);
}

void ShmMemory::read_private(int rank, std::uint64_t address, std::span<std::byte> to) {
  if (!private_) return NodeMemory::read_private(rank, address, to);
  private_->read(rank, address, to);
}

ShmMemory::~ShmMemory() {
  close_devices();
  for (auto& [rank, segments] : mapped_) {
    for (auto& [segment, mapping] : segments) munmap(mapping.data, mapping.bytes);
  }
}

}  // namespace sordino::shm
