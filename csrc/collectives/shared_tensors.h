// Functions by which the participants of one node find each other's memory.
#pragma once

#include <vector>

#include "collectives/participants.h"
#include "collectives/pieces.h"

namespace sordino {

// For smaller tensors, the extra round in which ranks publish locations costs more than it saves.
inline constexpr std::size_t kLeastInPlace = 32 * 1024;

// Publishes the location of this rank's tensor, at stage kOfferStage of `offered`. Then finds the tensors of all, in
// order of the participants. If one is not averaged in place, or not in memory that all map, `tensors` stays empty.
inline constexpr std::uint64_t kOfferStage = 1;
Task find_shared(Participants& participants, const Pieces& pieces, std::vector<std::byte*>& tensors);

// Waits until all peers have read the data that the last operation left in this rank's block (slots, staging,
// locations).
Task slots_free(Participants& participants);
// Gives memory to this rank's slots, for `chunks` chunks of up to `bytes` bytes. Throws TransportError if the machine
// has too little memory.
void reserve_slots(Participants& participants, std::uint64_t chunks, std::size_t bytes);
// Records that this operation has used the block, up to a stage of `finished`.
void slots_used(Participants& participants, std::uint64_t stage);
// The same for an operation at whose end only the devices meet. Says that this rank has read all locations.
void locations_read(Participants& participants, std::uint64_t stage);

// Calls slots_free(), then provides memory of this rank, for this operation, that its node maps.
Task take_staging(Participants& participants, std::size_t bytes, std::byte*& data);
// That memory of a participant of this node, once the participant has taken it and reached a later stage.
std::byte* staging_of(Participants& participants, int index);

}  // namespace sordino
