// Block of one rank of a process set, in memory that its node peers map. It holds counters of the rank's progress,
// locations of its tensors, and words by which devices wait for each other. It also holds slots: for tensors that peers
// cannot map, and for turns (one_shot.h).
//
//   0               counters, locations, words                  memory from the beginning
//   kOneShotBegin   heads of the slots for turns                memory from the beginning
//   kUnusedEnd      data of turns, of more than kBeside bytes   memory once ranks know of such an operation
//   kSlotsBegin     slots for tensors                           memory once the rank fills them
//
// So a set that is not used needs 8 KiB per rank. Each rank allocates memory for its own block (Segment::reserve), and
// its peers read only what it has published.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "collectives/one_shot.h"
#include "transport/location.h"

namespace sordino {

// A counter holds (sequence of the operation, stage within it). So it only grows, and a late reader never mistakes one
// operation for another.
struct alignas(64) SharedBlock {
  alignas(64) std::atomic<std::uint64_t> offered;  // inputs up to this stage may be read
  std::uint64_t first_cell;                        // of the operation's chunks in the slots (Slots)
  alignas(64) std::atomic<std::uint64_t> reduced;  // results up to this stage may be read
  // Up to this stage, this rank has read all that it needs of its peers' data.
  alignas(64) std::atomic<std::uint64_t> finished;
  std::atomic<std::uint64_t> given_up;      // 1 + sequence of the latest operation that this rank gave up
  alignas(64) Location location;            // where the operation's tensor lies, if peers can reach it
  Location result, buffer;                  // of an exchange's result; of data of other nodes, or staging memory
  bool crowded;                             // this rank shares its core with others
  bool reaches_devices, waits_for_devices;  // this rank's device could map, and wait for, all peers' devices
  std::atomic<bool> let_go;                 // this rank's device waits for no peer, and its results are invalid
  static constexpr std::size_t kTold = 256;
  alignas(64) std::atomic<std::uint64_t> told[kTold];  // by member: latest stamp of its device (queue_barrier.h)
  static constexpr std::size_t kOneShotBegin = 4096;   // offsets in bytes
  static constexpr std::size_t kUnusedEnd = kOneShotBegin + OneShotSlots::kHead;
  static constexpr std::size_t kSlotsBegin = (kOneShotBegin + sizeof(OneShotSlots) + 4095) / 4096 * 4096;
  static constexpr int kSlots = 4;

  static std::size_t bytes_for(std::size_t slot_bytes) { return kSlotsBegin + kSlots * slot_bytes; }
  OneShotSlots& one_shot() {
    return *reinterpret_cast<OneShotSlots*>(reinterpret_cast<std::byte*>(this) + kOneShotBegin);
  }
  std::byte* slots() { return reinterpret_cast<std::byte*>(this) + kSlotsBegin; }
};
static_assert(sizeof(SharedBlock) <= SharedBlock::kOneShotBegin);

}  // namespace sordino
