// Broadcast: one participant's values become everybody's, by messages along a tree, or by NCCL.
#include "collectives/operations.h"

namespace sordino {
namespace {
constexpr std::size_t kSegment = std::size_t{1} << 20;  // of a pipelined broadcast
}

// A binomial tree, cut into segments so that a rank passes one on while it receives the next.
Task broadcast(Participants& participants, int root, const std::byte* input, std::byte* output, std::size_t bytes) {
  if (participants.channel) {
    if ((participants.me + 1) % participants.size() != root)
      participants.count_sent((participants.me + 1) % participants.size(), bytes);
    co_await nccl::broadcast(*participants.channel, root, input, output, bytes);
    co_return;
  }
  const int size = participants.size(), place = (participants.me - root + size) % size;  // place 0 is the root
  if (participants.me == root && output != input) co_await participants.compute->copy(output, input, bytes);
  const auto rank_at = [&](int other) { return (other + root) % size; };
  std::vector<int> children;
  int parent = -1;
  for (int distance = 1; distance < size; distance *= 2) {
    if (place < distance) {
      if (place + distance < size) children.push_back(rank_at(place + distance));
    } else if (place < 2 * distance) {
      parent = rank_at(place - distance);
    }
  }
  std::vector<std::pair<int, std::unique_ptr<Transfer>>> sending;
  for (std::size_t at = 0; at < bytes; at += kSegment) {
    const std::span segment(output + at, std::min(kSegment, bytes - at));
    if (parent >= 0) {
      auto receiving = participants.receive(parent, segment);
      co_await participants.finished(*receiving, parent);
    }
    for (const int child : children) sending.emplace_back(child, participants.send(child, segment));
  }
  for (auto& [child, transfer] : sending) co_await participants.finished(*transfer, child);
}

namespace nccl {

Task broadcast(Channel& channel, int root, const std::byte* input, std::byte* output, std::size_t bytes) {
  co_await channel.ready();
  channel.communicator().broadcast(input, output, bytes, root, channel.stream());
  co_await channel.ready();
}

}  // namespace nccl
}  // namespace sordino
