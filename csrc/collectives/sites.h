// Sites: the groups of an operation's participants that share memory. All participants find the same sites.
#pragma once

#include <algorithm>
#include <vector>

#include "collectives/participants.h"

namespace sordino {

struct Sites {
  explicit Sites(const Participants& participants)
      : Sites(participants.transport, participants.ranks, participants.me, !participants.compute->device()) {}
  // `me`: index into `ranks`.
  Sites(const Transport& transport, const std::vector<int>& ranks, int me, bool on_host);

  const std::vector<int>& own() const { return all[mine]; }
  // The participant of another site that serves the one at `place` of this site. Each serves about equally many.
  int counterpart(std::size_t site, std::size_t place) const { return all[site][place % all[site].size()]; }
  // Whether some participants share the memory of the operation. Only host memory counts.
  bool some_share() const {
    return on_host && std::any_of(all.begin(), all.end(), [](const auto& site) { return site.size() > 1; });
  }

  std::vector<std::vector<int>> all;  // by site, in order of the first participants: indices of its participants
  bool on_host;
  std::size_t mine = 0;   // index in `all`
  std::size_t place = 0;  // of this rank in its site
};

}  // namespace sordino
