// A team: some participants of an operation, in an order of their own. They do a part of the operation by messages
// among themselves. Each of them knows all members.
#pragma once

#include <numeric>
#include <utility>
#include <vector>

#include "collectives/participants.h"

namespace sordino {

struct Team {
  Participants& all;
  std::vector<int> members;  // indices of participants
  int me;                    // place in members

  static Team whole(Participants& participants) {
    std::vector<int> members(participants.ranks.size());
    std::iota(members.begin(), members.end(), 0);
    return {participants, std::move(members), participants.me};
  }

  int size() const { return static_cast<int>(members.size()); }
  int at(int place) const { return members[static_cast<std::size_t>(place)]; }

  Task send(int to, std::span<const std::byte> data, Tag lane) const {
    auto sending = all.send(at(to), data, lane);
    co_await all.finished(*sending, at(to));
  }
  Task receive(int from, std::span<std::byte> data, Tag lane) const {
    auto receiving = all.receive(at(from), data, lane);
    co_await all.finished(*receiving, at(from));
  }
  // Sends to one member while receiving from another (or the same).
  Task exchange(int to, std::span<const std::byte> out, int from, std::span<std::byte> in, Tag lane) const {
    return all.exchange(at(to), out, at(from), in, lane);
  }
};

}  // namespace sordino
