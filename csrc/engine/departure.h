// Departure of a rank: its description in the errors of operations that need the rank.
#pragma once

#include <string>
#include <vector>

namespace sordino {

struct Departure {
  std::string text;       // "rank 3, which has shut down" or "... is lost", with the cause if it is known
  std::vector<int> lost;  // ranks of the PeerLost: this rank, or the ranks whose loss made it leave
};

}  // namespace sordino
