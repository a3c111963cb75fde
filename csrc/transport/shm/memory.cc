#include "transport/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

namespace sordino::shm {
namespace {

std::string reason() { return std::strerror(errno); }

// What the kernel could still hand out. A memfd has no size limit of its own: reserving more than there is would not
// fail, it would wake the out-of-memory killer.
std::size_t available_memory() {
  std::size_t available = SIZE_MAX;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string word; meminfo >> word;) {
    std::size_t kibibytes = 0;
    if (word == "MemAvailable:" && meminfo >> kibibytes) available = kibibytes * 1024;
  }
  std::size_t limit = 0, used = 0;
  std::ifstream maximum("/sys/fs/cgroup/memory.max"), current("/sys/fs/cgroup/memory.current");
  if (maximum >> limit && current >> used) {
    // Cached files count as used, but make room.
    std::ifstream statistics("/sys/fs/cgroup/memory.stat");
    std::string name;
    for (std::size_t value = 0; statistics >> name >> value;) {
      if (name == "active_file" || name == "inactive_file") used -= std::min(used, value);
    }
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

class MemfdSegment : public Segment {
 public:
  MemfdSegment(std::shared_ptr<SegmentTable> table, std::size_t size) : table_(std::move(table)) {
    if (const std::size_t available = available_memory(); size > available) {
      throw TransportError("no room for a shared segment of " + std::to_string(size) +
                           " bytes: " + std::to_string(available) + " are available");
    }
    fd_ = memfd_create("sordino", MFD_CLOEXEC);
    if (fd_ < 0) throw TransportError("memfd_create failed: " + reason());
    // Reserving the pages now turns "no memory left" into an error here instead of a SIGBUS at the first write.
    const int status = posix_fallocate(fd_, 0, static_cast<off_t>(size));
    if (status != 0) {
      close(fd_);
      throw TransportError("no room for a shared segment of " + std::to_string(size) +
                           " bytes: " + std::strerror(status));
    }
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
    if (address == MAP_FAILED) {
      const std::string why = reason();
      close(fd_);
      throw TransportError("cannot map a shared segment of " + std::to_string(size) + " bytes: " + why);
    }
    data = static_cast<std::byte*>(address);
    bytes = size;
    Location location;
    location.key = static_cast<std::uint64_t>(fd_);
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
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) throw TransportError("cannot open " + path + " of rank " + std::to_string(rank) + ": " + reason());
    struct stat file;
    if (fstat(fd, &file) != 0 || static_cast<std::uint64_t>(file.st_size) < location.bytes) {
      close(fd);
      throw TransportError(path + " is smaller than rank " + std::to_string(rank) + " says");
    }
    void* address = mmap(nullptr, location.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    const std::string why = reason();
    close(fd);
    if (address == MAP_FAILED) throw TransportError("cannot map " + path + ": " + why);
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
