#include "collectives/team.h"

#include "base/relax.h"
#include "collectives/nccl_operations.h"

namespace sordino {

void Team::count_sent(int index, std::size_t bytes) {
  const auto& node_of = transport.node_of();
  const bool same_node = node_of[ranks[index]] == node_of[ranks[me]];
  (same_node ? traffic.inside : traffic.across).fetch_add(bytes, std::memory_order_relaxed);
}

Stream Team::stream() const { return channel ? channel->stream() : compute->device()->queue(); }

Task Team::finished(Transfer& transfer, int index) {
  waits_for_ = [this, index] { return std::vector<int>{ranks[static_cast<std::size_t>(index)]}; };
  co_await until([&transfer] { return transfer.test(); });
  waits_for_ = nullptr;
}

Task Team::exchange(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) {
  auto receiving = receive(from, in);
  auto sending = send(to, out);
  co_await finished(*receiving, from);
  co_await finished(*sending, to);
}

Task Team::all_reached(std::atomic<std::uint64_t> Desk::* counter, std::uint64_t stage) {
  const std::uint64_t goal = stamp(stage);
  const auto late = [this, counter, goal](std::size_t index) {
    return static_cast<int>(index) != me && desks[index] &&
           (desks[index]->*counter).load(std::memory_order_acquire) < goal;
  };
  waits_for_ = [this, late] {
    std::vector<int> missing;
    for (std::size_t index = 0; index < desks.size(); ++index) {
      if (late(index)) missing.push_back(ranks[index]);
    }
    return missing;
  };
  // Peers with a core of their own answer within microseconds, faster than a round of the engine.
  co_await until([this, late, index = std::size_t{0}]() mutable {
    for (int look = 0; index < desks.size();) {
      if (!late(index)) {
        ++index;
      } else if (look++ < patience) {
        relax();
      } else {
        return false;
      }
    }
    return true;
  });
  waits_for_ = nullptr;
}

void Team::reach(std::atomic<std::uint64_t> Desk::* counter, std::uint64_t stage) {
  Desk* own = desks[static_cast<std::size_t>(me)];
  if (!own) return;  // nobody shares memory with this rank
  (own->*counter).store(stamp(stage), std::memory_order_release);
  for (std::size_t index = 0; index < desks.size(); ++index) {
    if (static_cast<int>(index) != me && desks[index]) transport.ring(ranks[index]);
  }
}

}  // namespace sordino
