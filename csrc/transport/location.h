// Names a place in memory that node peers can map.
#pragma once

#include <cstdint>

#include "device/ticket.h"

namespace sordino {

struct Location {
  std::uint64_t segment = 0;  // 0 means "in no memory that can be mapped"
  std::uint64_t bytes = 0;    // of the whole segment
  std::uint64_t offset = 0;   // of the place
  std::uint64_t key = 0;      // how a peer finds host memory (a file descriptor, an address)
  std::uint64_t file = 0;     // of a file descriptor: the inode behind it, for the number may be another file's by then
  std::uint64_t openers = 0;  // of device memory: the segment, found by `key`, that lists who has it open
  std::uint64_t device = 0;   // identity of the device whose memory it is; 0 for the host's
  Ticket ticket{};            // how a peer finds device memory
};

}  // namespace sordino
