// What the participants of one node know of each other's memory.
#pragma once

#include <vector>

#include "collectives/participants.h"
#include "collectives/pieces.h"

namespace sordino {

// Smaller tensors are not worth the extra round in which ranks tell each other where theirs lie.
inline constexpr std::size_t kLeastInPlace = 32 * 1024;

// Tells the node where this rank's tensor lies, at stage kOfferStage of `offered`, and finds where the others' do, in
// order of the participants, if those of all are to be averaged in place and lie in memory that all map; else nothing.
inline constexpr std::uint64_t kOfferStage = 1;
Task find_shared(Participants& participants, const Pieces& pieces, std::vector<std::byte*>& tensors);

// Waits until what the operation that used this rank's block (slots, staging, locations) last left there has been read
// by all.
Task slots_free(Participants& participants);
// Says that this operation has used it, up to a stage of `finished`.
void slots_used(Participants& participants, std::uint64_t stage);
// The same, of an operation at whose end only the devices meet: this rank has read all locations.
void locations_read(Participants& participants, std::uint64_t stage);

// Waits for the same, and finds memory of this rank, for this operation, that its node maps.
Task take_staging(Participants& participants, std::size_t bytes, std::byte*& data);
// That of a participant of this node that has taken it, and reached a stage since.
std::byte* staging_of(Participants& participants, int index);

}  // namespace sordino
