// Functions by which the participants of one node find each other's memory.
#pragma once

#include <vector>

#include "collectives/participants.h"
#include "collectives/pieces.h"

namespace sordino {

// For smaller tensors, the extra round in which ranks publish locations costs more than it saves.
inline constexpr std::size_t kLeastInPlace = 32 * 1024;
inline constexpr std::size_t kLine = 64;  // bytes of a cache line

// Publishes the location of this rank's tensor, at stage kOfferStage of `offered`. Then finds the tensors of this
// node's participants, in order. `tensors` stays empty unless all are averaged in place, in memory that all map.
inline constexpr std::uint64_t kOfferStage = 1;
Task find_shared(Participants& participants, const Pieces& pieces, std::vector<std::byte*>& tensors);

// Waits until all peers have read the data that the last operation left in this rank's block (slots, staging,
// locations).
Task slots_free(Participants& participants);

// Places of an operation's chunks in the slots. The slots of a rank are a ring, divided into as many cells as there is
// room for, at least SharedBlock::kSlots. An operation begins behind the cells of the last one. So a rank writes to
// cache lines that peers have read a while ago, and that have left their caches: with the same few lines each time, an
// operation of 64 to 256 KiB takes twice as long.
class Slots {
 public:
  // `bytes`: of a chunk, at most slot_bytes; equal on all participants.
  Slots(const Participants& participants, std::size_t bytes);

  // Takes cells of this rank for `chunks` chunks, and reserves their memory. Call it after slots_free(), and before the
  // rank offers a chunk. Throws TransportError if the machine has too little memory.
  void take(Participants& participants, std::uint64_t chunks);
  // Place of a chunk of a participant, which has taken its cells.
  std::byte* at(std::size_t participant, std::uint64_t chunk) const {
    SharedBlock& block = *blocks_[participant];
    return block.slots() + (block.first_cell + chunk) % cells_ * cell_;
  }

 private:
  const std::vector<SharedBlock*>& blocks_;
  std::size_t cell_, cells_;  // bytes of a cell, and number of cells
};

// Records that this operation has used the block, up to a stage of `finished`.
void slots_used(Participants& participants, std::uint64_t stage);
// As slots_used(), for an operation at whose end only devices meet: tells peers that this rank has read all locations.
void locations_read(Participants& participants, std::uint64_t stage);

// Calls slots_free(), then sets `data` to memory of this rank that its node maps, for this operation.
Task take_staging(Participants& participants, std::size_t bytes, std::byte*& data);
// Staging memory of a participant of this node, once the participant has taken it and reached a later stage.
std::byte* staging_of(Participants& participants, int index);

}  // namespace sordino
