#include "transport/shm/shm.h"

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

// What has been taken of a stream leaves it when this goes, also where the sink has thrown: a message is given once.
struct Taken {
  explicit Taken(Bytes& of) : stream(of) {}
  ~Taken() { stream.erase(stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(bytes)); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  Bytes& stream;
  std::size_t bytes = 0;
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
  for (auto& [rank, segments] : mapped_) {
    for (auto& [segment, mapping] : segments) munmap(mapping.data, mapping.bytes);
  }
}

// A control message is some kilobytes long, with thousands of tensors some megabytes. A longer one is none: whoever
// waited for its end would wait for ever, and keep all that follows.
constexpr std::size_t kMostBytes = std::size_t{1} << 28;

// A box is its owner's doorbell, then one ring for each possible writer.
struct Mailboxes::Ring {
  static constexpr std::size_t kBytes = 64 * 1024 - 128;
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  std::byte data[kBytes];
};

std::size_t Mailboxes::bytes_for(std::size_t node_size) { return sizeof(Doorbell) + node_size * sizeof(Ring); }

Mailboxes::Mailboxes(std::vector<int> here, int self, std::vector<std::byte*> boxes)
    : here_(std::move(here)), self_(self), boxes_(std::move(boxes)), outgoing_(here_.size()), incoming_(here_.size()) {
  for (std::byte* box : boxes_) bells_.push_back(reinterpret_cast<Doorbell*>(box));
}

Mailboxes::Ring& Mailboxes::ring(int owner, int writer) {
  return reinterpret_cast<Ring*>(boxes_[owner] + sizeof(Doorbell))[writer];
}

void Mailboxes::post(int to, Bytes message) {
  if (message.size() > kMostBytes)
    throw TransportError("a control message of " + std::to_string(message.size()) + " bytes for rank " +
                         std::to_string(here_[to]) + " is longer than any can be (" + std::to_string(kMostBytes) + ")");
  Bytes& queue = outgoing_[to].bytes;
  const auto size = static_cast<std::uint32_t>(message.size());
  const auto* head = reinterpret_cast<const std::byte*>(&size);
  queue.insert(queue.end(), head, head + sizeof(size));
  queue.insert(queue.end(), message.begin(), message.end());
  flush(to);
}

bool Mailboxes::flush(int to) {
  Outgoing& out = outgoing_[to];
  if (out.bytes.empty()) return false;
  Ring& box = ring(to, self_);
  std::uint64_t written = box.written.load(std::memory_order_relaxed);
  const std::uint64_t room = Ring::kBytes - (written - box.read.load(std::memory_order_acquire));
  std::size_t left = std::min<std::size_t>(room, out.bytes.size() - out.sent);
  if (left == 0) return false;
  while (left > 0) {
    const std::size_t at = written % Ring::kBytes;
    const std::size_t part = std::min(left, Ring::kBytes - at);
    std::memcpy(box.data + at, out.bytes.data() + out.sent, part);
    out.sent += part;
    written += part;
    left -= part;
  }
  box.written.store(written, std::memory_order_release);
  if (out.sent == out.bytes.size()) {
    out.bytes.clear();
    out.sent = 0;
  }
  bells_[to]->ring();
  return true;
}

bool Mailboxes::poll(const Sink& sink) {
  bool moved = false;
  for (std::size_t writer = 0; writer < here_.size(); ++writer) {
    moved |= flush(static_cast<int>(writer));
    Ring& box = ring(self_, static_cast<int>(writer));
    std::uint64_t read = box.read.load(std::memory_order_relaxed);
    const std::uint64_t written = box.written.load(std::memory_order_acquire);
    if (read == written) continue;
    moved = true;
    const std::uint64_t backlog = written - read;
    Bytes& stream = incoming_[writer];
    while (read < written) {
      const std::size_t at = read % Ring::kBytes;
      const std::size_t part = std::min<std::size_t>(written - read, Ring::kBytes - at);
      stream.insert(stream.end(), box.data + at, box.data + at + part);
      read += part;
    }
    box.read.store(read, std::memory_order_release);
    if (backlog > Ring::kBytes / 2) bells_[writer]->ring();  // its writer may be waiting for room
    std::uint32_t size = 0;
    bool plausible = true;
    {
      Taken taken(stream);
      while (stream.size() - taken.bytes >= sizeof(size)) {
        std::memcpy(&size, stream.data() + taken.bytes, sizeof(size));
        plausible = size <= kMostBytes;
        if (!plausible || stream.size() - taken.bytes - sizeof(size) < size) break;
        const auto message = std::span(stream).subspan(taken.bytes + sizeof(size), size);
        taken.bytes += sizeof(size) + size;
        sink(here_[writer], message);
      }
    }
    if (!plausible)
      throw TransportError("rank " + std::to_string(here_[writer]) + " announces a control message of " +
                           std::to_string(size) + " bytes, longer than any can be (" + std::to_string(kMostBytes) +
                           "): its mailbox is damaged");
  }
  return moved;
}

bool Mailboxes::idle() const {
  return std::all_of(outgoing_.begin(), outgoing_.end(), [](const Outgoing& out) { return out.bytes.empty(); });
}

}  // namespace sordino::shm
