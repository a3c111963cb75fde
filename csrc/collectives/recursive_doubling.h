// Combination of a team's whole vectors by messages, in a binary tree that is the same on all members
// (topology/schedule.h).
#pragma once

#include <span>

#include "collectives/team.h"
#include "topology/schedule.h"

namespace sordino {

// Combines the vectors of all members, each of `data`'s size. merge(lower, upper, into) returns an Until. Both partners
// pass the lower member's data first. `received` is memory for one vector.
template <class Merge>
Task recursive_doubling(const Team& team, std::span<std::byte> data, std::byte* received, Tag lane, Merge merge) {
  using topology::Brings;
  const std::span theirs(received, data.size());
  for (const auto& [partner, gives, brings, round] : topology::doubling(team.size(), team.me)) {
    const std::span into = brings == Brings::kResult ? data : theirs;
    if (gives && brings != Brings::kNothing) {
      co_await team.exchange(partner, data, partner, into, lane);
    } else if (gives) {
      co_await team.send(partner, data, lane);
    } else {
      co_await team.receive(partner, into, lane);
    }
    if (brings != Brings::kPartial) continue;
    if (team.me < partner) {
      co_await merge(data.data(), theirs.data(), data.data());
    } else {
      co_await merge(theirs.data(), data.data(), data.data());
    }
  }
}

}  // namespace sordino
