#include "collectives/participants.h"

#include "base/error.h"
#include "base/relax.h"

namespace sordino {

namespace {

// Stands for a transfer that could not begin. It never ends.
class NoTransfer : public Transfer {
 public:
  bool test() override { return false; }
};

}  // namespace

std::unique_ptr<Transfer> Participants::send(int index, std::span<const std::byte> data, Tag lane) {
  count_sent(index, data.size());
  try {
    return transport.send(ranks[static_cast<std::size_t>(index)], tag | lane, data);
  } catch (const PeerLost&) {
    lost = std::current_exception();
    return std::make_unique<NoTransfer>();
  }
}

std::unique_ptr<Transfer> Participants::receive(int index, std::span<std::byte> data, Tag lane) {
  try {
    return transport.receive(ranks[static_cast<std::size_t>(index)], tag | lane, data);
  } catch (const PeerLost&) {
    lost = std::current_exception();
    return std::make_unique<NoTransfer>();
  }
}

Task Participants::finished(Transfer& transfer, int index) {
  const Waiting waiting(*this, [this, index] { return std::set<int>{ranks[static_cast<std::size_t>(index)]}; });
  co_await until([this, &transfer] {
    try {
      return transfer.test();
    } catch (const PeerLost&) {
      lost = std::current_exception();
      return false;
    }
  });
}

Task Participants::exchange(int to, std::span<const std::byte> out, int from, std::span<std::byte> in, Tag lane) {
  auto receiving = receive(from, in, lane);
  auto sending = send(to, out, lane);
  co_await finished(*receiving, from);
  co_await finished(*sending, to);
}

Task Participants::all_reached(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage) {
  const std::uint64_t goal = stamp(stage);
  const auto late = [this, counter, goal](std::size_t index) {
    return static_cast<int>(index) != me && blocks[index] &&
           (blocks[index]->*counter).load(std::memory_order_acquire) < goal;
  };
  const Waiting waiting(*this, [this, late] {
    std::set<int> missing;
    for (std::size_t index = 0; index < blocks.size(); ++index) {
      if (late(index)) missing.insert(ranks[index]);
    }
    return missing;
  });
  // Peers with a core of their own answer within microseconds, faster than a round of the engine.
  co_await until([this, late, index = std::size_t{0}]() mutable {
    for (int look = 0; index < blocks.size();) {
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
}

Task Participants::reached(int index, std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage) {
  const std::uint64_t goal = stamp(stage);
  const auto& value = blocks[static_cast<std::size_t>(index)]->*counter;
  for (int look = 0; value.load(std::memory_order_acquire) < goal && look < patience; ++look) relax();
  if (value.load(std::memory_order_acquire) >= goal) co_return;
  const Waiting waiting(*this, [this, index] { return std::set<int>{ranks[static_cast<std::size_t>(index)]}; });
  co_await until([&value, goal] { return value.load(std::memory_order_acquire) >= goal; });
}

void Participants::reach(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage) {
  SharedBlock* own = blocks[static_cast<std::size_t>(me)];
  if (!own) return;  // no peer shares memory with this rank
  (own->*counter).store(stamp(stage), std::memory_order_release);
  for (std::size_t index = 0; index < blocks.size(); ++index) {
    if (static_cast<int>(index) != me && blocks[index]) transport.ring(ranks[index]);
  }
}

Task Participants::meet(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage) {
  if (barrier) {
    barrier->meet(members, stamp(stage));
    co_return;
  }
  reach(counter, stage);
  co_await all_reached(counter, stage);
}

}  // namespace sordino
