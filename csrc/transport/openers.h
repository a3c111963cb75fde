// Openers: list of the processes that have a block of device memory open. The list is in host memory that they share.
// CUDA forbids the owner to free the block before all of them have closed it. The death of a process closes everything.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <string>

#include "base/error.h"

namespace sordino {

// Zeroed memory is an empty list.
class Openers {
 public:
  using Entry = std::atomic<pid_t>;

  // Adds an entry for this process, which may have several. Throws TransportError if the list is full.
  Entry* enter() {
    for (Entry& entry : entries_) {
      pid_t unused = 0;
      if (entry.compare_exchange_strong(unused, getpid())) return &entry;
    }
    throw TransportError("more than " + std::to_string(entries_.size()) + " processes have mapped the same memory");
  }
  // No effect in a forked child: the entry is the parent's, which still has the memory open.
  static void leave(Entry* entry) {
    pid_t own = getpid();
    entry->compare_exchange_strong(own, 0);
  }
  bool none() const {
    for (const Entry& entry : entries_) {
      const pid_t pid = entry.load();
      if (pid != 0 && (kill(pid, 0) == 0 || errno != ESRCH)) return false;
    }
    return true;
  }

 private:
  std::array<Entry, 1024> entries_;
};
static_assert(std::atomic<pid_t>::is_always_lock_free);

}  // namespace sordino
