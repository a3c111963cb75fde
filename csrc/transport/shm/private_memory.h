// Memory of node peers that is not shared. The kernel copies it from one process to another (process_vm_readv), so it
// is copied once, and not twice as through shared memory.
//
// A process id may belong to another process by the time of a call. So each process has a random mark. A reader reads
// the owner's mark in the same call as the data, from the same address space, and compares it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>

namespace sordino::shm {

class PrivateMemory {
 public:
  struct Mark {
    std::uint64_t address, value;
  };
  // The mark of this process.
  static Mark mark();

  void introduce(int rank, pid_t pid, const Mark& mark) { owners_[rank] = {pid, mark}; }
  // Empty if this process may read the memory of `rank`, else the reason.
  std::string why_unreadable(int rank) const;
  // Copies from `address` in the process of `rank`. Throws MemoryGone if the process has ended, NotCopied if the kernel
  // cannot copy these bytes, and TransportError if it refuses all.
  void read(int rank, std::uint64_t address, std::span<std::byte> to) const;

  // Whether the kernel can copy this memory of this process. It cannot copy memory of devices, for example.
  static bool readable(const void* data, std::size_t bytes);
  // Whether this machine copies faster in this way than through slots in shared memory. Takes about a millisecond.
  static bool saves_time();

 private:
  struct Owner {
    pid_t pid;
    Mark mark;
  };
  std::unordered_map<int, Owner> owners_;
};

}  // namespace sordino::shm
