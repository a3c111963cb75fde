#include "collectives/node_pipeline.h"

#include <algorithm>
#include <cstring>

#include "collectives/shared_tensors.h"

namespace sordino {
namespace {

constexpr std::size_t kLeastChunk = 32 * 1024;

std::uint64_t stage(std::uint64_t chunk) { return kOfferStage + 1 + chunk; }

class NodePipeline {
 public:
  NodePipeline(Participants& participants, NodeMove& move)
      : participants_(participants),
        move_(move),
        most_(*std::max_element(move.sizes.begin(), move.sizes.end())),
        // At least as many chunks as slots, so that ranks fill and take at the same time.
        chunk_(std::clamp((most_ / SharedBlock::kSlots + 63) / 64 * 64, std::min(kLeastChunk, participants.slot_bytes),
                          participants.slot_bytes)) {}

  std::size_t most() const { return most_; }
  std::uint64_t chunks() const { return std::max<std::uint64_t>((most_ + chunk_ - 1) / chunk_, 1); }
  bool gives(int participant) const { return move_.sizes[static_cast<std::size_t>(participant)] > 0; }

  void fill(std::uint64_t chunk) {
    if (const std::size_t bytes = bytes_of(participants_.me, chunk); bytes > 0)
      std::memcpy(slot_of(participants_.me, chunk), move_.input + chunk * chunk_, bytes);
    participants_.reach(&SharedBlock::offered, stage(chunk));
  }
  void take(std::uint64_t chunk) {
    for (int step = 0; step < participants_.size(); ++step) {  // each rank begins with another one
      const int peer = (participants_.me + step) % participants_.size();
      const std::size_t bytes = bytes_of(peer, chunk);
      const bool mine = peer == participants_.me;
      if (bytes > 0)
        move_.take(peer, chunk * chunk_, bytes, mine ? move_.input + chunk * chunk_ : slot_of(peer, chunk));
    }
    participants_.reach(&SharedBlock::finished, stage(chunk));
  }

 private:
  std::size_t bytes_of(int participant, std::uint64_t chunk) const {
    const std::size_t size = move_.sizes[static_cast<std::size_t>(participant)], begin = chunk * chunk_;
    return begin < size ? std::min(chunk_, size - begin) : 0;
  }
  std::byte* slot_of(int participant, std::uint64_t chunk) const {
    return participants_.blocks[static_cast<std::size_t>(participant)]->slot(chunk, participants_.slot_bytes);
  }

  Participants& participants_;
  NodeMove& move_;
  const std::size_t most_, chunk_;
};

// Waits for the participants that give data.
Task offered(Participants& participants, const NodePipeline& line, std::uint64_t at) {
  for (int peer = 0; peer < participants.size(); ++peer) {
    if (peer != participants.me && line.gives(peer)) co_await participants.reached(peer, &SharedBlock::offered, at);
  }
}

// Offers this rank's location, and returns those of all that give data. Empty if one of them is not in shared memory.
Task find_inputs(Participants& participants, const NodeMove& move, const NodePipeline& line,
                 std::vector<const std::byte*>& inputs) {
  NodeMemory& memory = participants.transport.node_memory();
  const auto me = static_cast<std::size_t>(participants.me);
  SharedBlock& own = *participants.blocks[me];
  own.location = move.sizes[me] > 0 ? memory.locate(move.input, move.sizes[me]) : Location{};
  participants.reach(&SharedBlock::offered, kOfferStage);
  co_await offered(participants, line, kOfferStage);
  std::vector<const std::byte*> found(move.sizes.size());
  for (int peer = 0; peer < participants.size(); ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    if (!line.gives(peer)) continue;
    const Location& location = participants.blocks[index]->location;
    if (location.segment == 0) co_return;
    found[index] = index == me ? move.input : memory.map(participants.ranks[index], location);
  }
  inputs = std::move(found);
}

}  // namespace

Task move_in_node(Participants& participants, NodeMove move) {
  NodePipeline line(participants, move);
  const std::uint64_t chunks = line.chunks(), last = stage(chunks - 1);
  const bool gives = line.gives(participants.me);
  co_await slots_free(participants);
  std::vector<const std::byte*> inputs;
  if (line.most() >= kLeastInPlace) co_await find_inputs(participants, move, line, inputs);
  if (!inputs.empty()) {
    for (int step = 0; step < participants.size(); ++step) {
      const auto peer = static_cast<std::size_t>((participants.me + step) % participants.size());
      if (move.sizes[peer] > 0) move.take(static_cast<int>(peer), 0, move.sizes[peer], inputs[peer]);
    }
    participants.reach(&SharedBlock::finished, last);
    if (gives) co_await participants.all_reached(&SharedBlock::finished, last);  // then the caller may change its input
  } else {
    if (gives) {
      reserve_slots(participants, chunks, std::min(line.most(), participants.slot_bytes));
      line.fill(0);
    }
    for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
      if (gives && chunk + 1 < chunks) {
        if (chunk + 1 >= SharedBlock::kSlots)
          co_await participants.all_reached(&SharedBlock::finished, stage(chunk + 1 - SharedBlock::kSlots));
        line.fill(chunk + 1);
      }
      co_await offered(participants, line, stage(chunk));
      line.take(chunk);
    }
  }
  slots_used(participants, last);
  participants.stages_used += last;
}

}  // namespace sordino
