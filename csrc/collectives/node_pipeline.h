// Data exchange between the participants of one node: all-gather, all-to-all, broadcast and reduce-scatter.
//
// Each participant's input has a part for each participant, or one part that all take. Inputs that peers can reach
// (NodeMemory::offer) are read where they are. Other inputs pass through slots of their ranks, in chunks that stay in
// the cache. A slot has a lane for each part:
//
//   fill   the chunk of each part of my input   -> the lanes of my slot   offered  = stage(chunk)
//   take   my lane of each peer's slot          -> my output              finished = stage(chunk)
//
// A rank fills chunk k once all have taken chunk k - kSlots, which its slot held.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "collectives/participants.h"

namespace sordino {

struct NodeMove {
  struct Part {
    std::size_t begin = 0, bytes = 0;  // within the giver's input
  };
  // Bytes of a participant's part for this rank.
  using Source = std::span<const std::byte>;

  const std::byte* input;
  std::vector<std::vector<Part>> parts;  // by giver, by taker; or one part that all take. Equal on all participants
  // Destinations of the participants' parts for this rank. If this is empty, `fold` takes the parts.
  std::vector<std::byte*> places = {};
  // Called repeatedly with the next bytes, from offset `at` on, of each participant's part for this rank. This rank's
  // own source is its input.
  std::function<void(std::size_t at, const std::vector<Source>& sources)> fold = {};
};

// Whether the kernel should copy parts from private memory. `most`: bytes of the largest part for another rank.
// `givers`: ranks that give parts to others. `taken_once`: no part has several takers. If a part has several, one copy
// to a slot serves all of them.
bool is_for_kernel(std::size_t most, int givers, bool taken_once);
// Whether the participants can exchange data in this way: they share memory, the data is the host's, and a slot has
// room for a lane of each (if `lanes`).
bool moves_in_node(const Participants& participants, bool lanes);
// Also counts the bytes that this rank gives as sent.
Task move_in_node(Participants& participants, NodeMove move);

}  // namespace sordino
