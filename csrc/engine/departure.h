// What operations report that need a rank which has left.
#pragma once

#include <string>
#include <vector>

namespace sordino {

struct Departure {
  std::string text;       // "rank 3, which has shut down", with the cause if there is one
  std::vector<int> lost;  // ranks for PeerLost: this rank, or those because of whose loss it has left
};

}  // namespace sordino
