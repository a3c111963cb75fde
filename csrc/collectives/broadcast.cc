// Broadcast: one participant's values become everybody's, by messages along a tree, or by NCCL. Each node gets them
// once.
#include <algorithm>

#include "collectives/collective.h"
#include "collectives/operations.h"

namespace sordino {
namespace {

constexpr std::size_t kSegment = std::size_t{1} << 20;  // of a pipelined broadcast
constexpr std::size_t kSegmentsOfChain = 4;             // from which on one is long enough for a chain of nodes

// Whom a rank receives from, -1 for the root, and whom it sends to.
struct Branch {
  int parent = -1;
  std::vector<int> children;
};

// Adds a binomial tree among members, of which the first is the root.
void add_tree(const std::vector<int>& members, int me, Branch& branch) {
  const auto size = static_cast<int>(members.size());
  const auto place = static_cast<int>(std::find(members.begin(), members.end(), me) - members.begin());
  for (int distance = 1; distance < size; distance *= 2) {
    if (place < distance) {
      if (place + distance < size) branch.children.push_back(members[static_cast<std::size_t>(place + distance)]);
    } else if (place < 2 * distance) {
      branch.parent = members[static_cast<std::size_t>(place - distance)];
    }
  }
}

// What is long goes from node to node in a chain, where each link carries it once in each direction; else along a tree.
// Within each node it goes along a tree.
Branch branch_of(const Participants& participants, int root, bool is_long) {
  const Sites sites(participants);
  std::vector<int> leaders{root}, node;  // of the other nodes the first ranks
  for (const auto& site : sites.all) {
    const bool is_root = std::find(site.begin(), site.end(), root) != site.end();
    if (!is_root) leaders.push_back(site.front());
    if (&site != &sites.own()) continue;
    node = site;
    if (is_root) std::iter_swap(node.begin(), std::find(node.begin(), node.end(), root));
  }
  Branch branch;
  if (node.front() == participants.me) {
    if (is_long) {
      const auto place = std::find(leaders.begin(), leaders.end(), participants.me);
      if (place != leaders.begin()) branch.parent = *std::prev(place);
      if (std::next(place) != leaders.end()) branch.children.push_back(*std::next(place));
    } else {
      add_tree(leaders, participants.me, branch);
    }
  }
  add_tree(node, participants.me, branch);
  return branch;
}

}  // namespace

// In segments, so that a rank passes one on while it receives the next.
Task broadcast(Participants& participants, int root, const std::byte* input, std::byte* output, std::size_t bytes) {
  if (participants.channel) {
    if ((participants.me + 1) % participants.size() != root)
      participants.count_sent((participants.me + 1) % participants.size(), bytes);
    co_await nccl::broadcast(*participants.channel, root, input, output, bytes);
    co_return;
  }
  if (participants.me == root && output != input) co_await participants.compute->copy(output, input, bytes);
  const auto [parent, children] = branch_of(participants, root, bytes >= kSegmentsOfChain * kSegment);
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

namespace collectives {
namespace {

Task run(Operation& operation) {
  Participants& participants = *operation.participants;
  const Request& request = operation.first();
  const auto root =
      std::find(participants.ranks.begin(), participants.ranks.end(), request.root) - participants.ranks.begin();
  for (const Tensor& tensor : request.tensors) {
    co_await broadcast(participants, static_cast<int>(root), tensor.input, tensor.output, tensor.bytes());
  }
}

}  // namespace

const Collective kBroadcast{.name = "broadcast", .only_root_gives = true, .run = run};

}  // namespace collectives
}  // namespace sordino
