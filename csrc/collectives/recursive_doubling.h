// Combining the whole vectors of a team in a binary tree that is the same on all of them, by messages.
#pragma once

#include <bit>
#include <span>

#include "collectives/team.h"

namespace sordino {

// Combines the vectors of all members, of `data`'s size: merge(lower, upper, into), an Until, with the lower member's
// data first, on both partners alike. Members beyond the largest power of two first give theirs to a partner, and get
// the result last. `arrived`: memory for a vector.
template <class Merge>
Task recursive_doubling(const Team& team, std::span<std::byte> data, std::byte* arrived, Tag lane, Merge merge) {
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(team.size()))), extra = team.size() - power;
  const std::span theirs(arrived, data.size());
  if (team.me >= power) {
    co_await team.send(team.me - power, data, lane);
    co_await team.receive(team.me - power, data, lane);
    co_return;
  }
  if (team.me < extra) {
    co_await team.receive(team.me + power, theirs, lane);
    co_await merge(data.data(), theirs.data(), data.data());
  }
  for (int distance = 1; distance < power; distance *= 2) {
    const int partner = team.me ^ distance;
    co_await team.exchange(partner, data, partner, theirs, lane);
    if (team.me < partner) {
      co_await merge(data.data(), theirs.data(), data.data());
    } else {
      co_await merge(theirs.data(), data.data(), data.data());
    }
  }
  if (team.me < extra) co_await team.send(team.me + power, data, lane);
}

}  // namespace sordino
