// What one rank lays out for the node peers of a process set, in memory that they map: counters that say how far it is,
// where its tensors lie, words by which devices wait for each other, slots through which the values of tensors pass
// that peers cannot map, and those of one-shot all-reduce.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "collectives/one_shot.h"
#include "transport/location.h"

namespace sordino {

// The counters hold (sequence of the operation, stage within it), so they only grow and a late reader never mistakes
// one for another.
struct alignas(64) SharedBlock {
  alignas(64) std::atomic<std::uint64_t> offered;   // inputs up to this stage may be read
  alignas(64) std::atomic<std::uint64_t> reduced;   // results up to this stage may be read
  alignas(64) std::atomic<std::uint64_t> finished;  // this rank reads nothing of its peers up to this stage any more
  alignas(64) Location location;                    // where the operation's tensor lies, if in shared memory
  Location result, buffer;                          // of an exchange: where its result goes, what other nodes sent
  bool reaches_devices, waits_for_devices;          // whether this rank's device could map and reach all of the others'
  std::atomic<bool> let_go;  // this rank's device waits for nobody any more, and what it does is nothing
  static constexpr std::size_t kTold = 256;
  alignas(64) std::atomic<std::uint64_t> told[kTold];  // by member: how far its device is (queue_barrier.h)
  static constexpr std::size_t kOneShotBegin = 4096;   // offsets
  static constexpr std::size_t kSlotsBegin = (kOneShotBegin + sizeof(OneShotSlots) + 4095) / 4096 * 4096;
  static constexpr int kSlots = 4;

  static std::size_t bytes_for(std::size_t slot_bytes) { return kSlotsBegin + kSlots * slot_bytes; }
  OneShotSlots& one_shot() {
    return *reinterpret_cast<OneShotSlots*>(reinterpret_cast<std::byte*>(this) + kOneShotBegin);
  }
  std::byte* slot(std::uint64_t number, std::size_t slot_bytes) {
    return reinterpret_cast<std::byte*>(this) + kSlotsBegin + number % kSlots * slot_bytes;
  }
};
static_assert(sizeof(SharedBlock) <= SharedBlock::kOneShotBegin);

}  // namespace sordino
