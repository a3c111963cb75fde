// Data that the participants of one node move among each other without a fold: all-gather and broadcast.
//
// Inputs in shared memory are read where they are. Others pass through slots of their ranks, in chunks that stay in the
// cache:
//
//   fill   my input of the chunk   -> my slot       offered  = stage(chunk)
//   take   the peers' slots        -> my output     finished = stage(chunk)
//
// A rank fills chunk k once all have taken chunk k - kSlots, which its slot held.
#pragma once

#include <functional>
#include <vector>

#include "collectives/participants.h"

namespace sordino {

// The part of this rank in a move: participant i gives `sizes[i]` bytes. All participants have the same sizes.
struct NodeMove {
  // Called with a range of a participant's input, in order, and where this rank can read it. Also called for this
  // rank's own input. It takes as much of it as it needs.
  using Take = std::function<void(int participant, std::size_t begin, std::size_t bytes, const std::byte* data)>;

  const std::byte* input;
  std::vector<std::size_t> sizes;
  Take take;
};

Task move_in_node(Participants& participants, NodeMove move);

}  // namespace sordino
