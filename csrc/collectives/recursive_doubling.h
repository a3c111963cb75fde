// Combining the whole vectors of all participants in a binary tree that is the same on all of them, by messages.
#pragma once

#include <bit>
#include <span>

#include "collectives/participants.h"
#include "collectives/pieces.h"

namespace sordino {

// Combines the whole vectors of all ranks in a binary tree: merge(lower, upper, into), an Until, with the lower rank's
// data first, on both partners alike. Ranks beyond the largest power of two first give theirs to a partner, and get the
// result last.
template <class Merge>
Task recursive_doubling(Participants& participants, std::span<std::byte> data, Merge merge) {
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(participants.size()))),
            extra = participants.size() - power;
  const auto memory = participants.compute->scratch(data.size());
  co_await participants.compute->idle();
  const std::span theirs(memory.get(), data.size());
  if (participants.me >= power) {
    const int partner = participants.me - power;
    auto sending = participants.send(partner, data);
    co_await participants.finished(*sending, partner);
    auto receiving = participants.receive(partner, data);
    co_await participants.finished(*receiving, partner);
    co_return;
  }
  if (participants.me < extra) {
    auto receiving = participants.receive(participants.me + power, theirs);
    co_await participants.finished(*receiving, participants.me + power);
    co_await merge(data.data(), theirs.data(), data.data());
  }
  for (int distance = 1; distance < power; distance *= 2) {
    const int partner = participants.me ^ distance;
    co_await participants.exchange(partner, data, partner, theirs);
    if (participants.me < partner) {
      co_await merge(data.data(), theirs.data(), data.data());
    } else {
      co_await merge(theirs.data(), data.data(), data.data());
    }
  }
  if (participants.me < extra) {
    auto sending = participants.send(participants.me + power, data);
    co_await participants.finished(*sending, participants.me + power);
  }
}

// The pieces as one contiguous buffer: the output itself where that is one tensor.
class Flat {
 public:
  Flat(Participants& participants, Pieces& pieces) : compute_(*participants.compute), pieces_(pieces) {
    if (pieces.all().size() != 1) scratch_ = compute_.scratch(pieces.bytes());
  }
  std::byte* data() { return scratch_ ? scratch_.get() : pieces_.all().front().output; }

  Task begin(double pre) {
    if (data() != pieces_.all().front().input) co_await compute_.flatten(pieces_.inputs(), data());
    if (pre != 1) co_await compute_.scale(pieces_.dtype(), data(), pieces_.count(), pre);
  }
  Task finish(double post) {
    if (post != 1) co_await compute_.scale(pieces_.dtype(), data(), pieces_.count(), post);
    if (scratch_) co_await compute_.unflatten(data(), pieces_.outputs());
  }

 private:
  Compute& compute_;
  Pieces& pieces_;
  std::shared_ptr<std::byte> scratch_;
};

}  // namespace sordino
