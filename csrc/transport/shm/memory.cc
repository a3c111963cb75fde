#include "transport/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/limits.h"
#include "base/system_error.h"

namespace sordino::shm {
namespace {

// Kernels before 6.10 undo a whole reservation that a signal interrupts. So a reservation that takes longer than the
// time between two signals never ends. This size takes some milliseconds.
constexpr std::size_t kSlice = std::size_t{16} << 20;

class MemfdSegment : public Segment {
 public:
  MemfdSegment(std::shared_ptr<SegmentTable> table, std::size_t size) : table_(std::move(table)) {
    // A memfd has no size limit of its own. Reserving more than there is would not fail, but wake the out-of-memory
    // killer.
    if (const std::size_t available = Limits().available_memory(); size > available) {
      throw TransportError("no room for a shared segment of " + std::to_string(size) +
                           " bytes: " + std::to_string(available) + " are available");
    }
    fd_ = memfd_create("sordino", MFD_CLOEXEC);
    if (fd_ < 0) throw TransportError("memfd_create failed: " + explained(errno));
    // Reserving the pages now turns "no memory left" into an error here instead of a SIGBUS at the first write.
    if (const int error = reserve(fd_, size); error != 0) {
      close(fd_);
      throw TransportError("no room for a shared segment of " + std::to_string(size) + " bytes: " + explained(error));
    }
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
    if (address == MAP_FAILED) {
      const std::string why = explained(errno);
      close(fd_);
      throw TransportError("cannot map a shared segment of " + std::to_string(size) + " bytes: " + why);
    }
    data = static_cast<std::byte*>(address);
    bytes = size;
    Location location;
    location.key = static_cast<std::uint64_t>(fd_);
    struct stat file{};
    fstat(fd_, &file);
    location.file = file.st_ino;
    table_->add(data, size, location);
  }
  ~MemfdSegment() override {
    table_->remove(data);
    munmap(data, bytes);
    close(fd_);
  }

 private:
  std::shared_ptr<SegmentTable> table_;
  int fd_;
};

}  // namespace

int reserve(int fd, std::size_t bytes, const std::function<int(int, off_t, off_t)>& allocate) {
  for (std::size_t at = 0; at < bytes;) {
    const std::size_t slice = std::min(kSlice, bytes - at);
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
  return std::make_shared<MemfdSegment>(table_, std::max<std::size_t>(bytes, 1));
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
    void* address = mmap(nullptr, location.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
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

ShmMemory::~ShmMemory() {
  close_devices();
  for (auto& [rank, segments] : mapped_) {
    for (auto& [segment, mapping] : segments) munmap(mapping.data, mapping.bytes);
  }
}

}  // namespace sordino::shm
