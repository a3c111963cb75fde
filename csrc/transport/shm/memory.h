// Memory that the processes of one machine share. A segment is a memfd. It never has a name, so no killed process can
// leave a file behind in /dev/shm. A peer opens it as /proc/<pid>/fd/<fd> on first use, and keeps the mapping.
#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

#include "transport/node_memory.h"
#include "transport/shm/private_memory.h"

namespace sordino::shm {

// Allocates the pages of [begin, end) of a file, so that a lack of memory is an error here, not a SIGBUS at the first
// write. Works slice by slice, and repeats a slice that a signal has interrupted. Returns 0 or an errno value.
// `allocate`: replaceable for tests.
int reserve(int fd, std::size_t begin, std::size_t end,
            const std::function<int(int, off_t, off_t)>& allocate = posix_fallocate);

class ShmMemory : public NodeMemory {
 public:
  std::shared_ptr<Segment> allocate(std::size_t bytes) override;
  std::shared_ptr<Segment> allocate_sparse(std::size_t bytes, std::size_t reserved) override;
  std::shared_ptr<Segment> adopt(std::byte* data, std::size_t bytes, int fd) override;

  // Sets the process of `rank`. Call it before memory of that rank is mapped, also if `rank` is this process's own.
  void introduce(int rank, pid_t pid) { pids_[rank] = pid; }
  // Lets peers copy from each other's private memory from now on. Call it on all ranks of the node, or on none.
  void read_private_with(PrivateMemory reader) { private_ = std::move(reader); }
  bool offers_private(const void* data, std::size_t bytes, Sure sure) const override {
    return private_ && (sure == Sure::kNo || PrivateMemory::readable(data, bytes));
  }
  ~ShmMemory() override;

 protected:
  std::byte* map_host(int rank, const Location& location) override;
  void unmap_host(int rank, std::uint64_t segment) override;
  void read_private(int rank, std::uint64_t address, std::span<std::byte> to) override;

 private:
  struct Mapping {
    std::byte* data;
    std::size_t bytes;
  };
  std::unordered_map<int, pid_t> pids_;
  std::optional<PrivateMemory> private_;
  std::unordered_map<int, std::unordered_map<std::uint64_t, Mapping>> mapped_;
};

}  // namespace sordino::shm
