// Broadcast: all participants get the values of the root, by messages along a tree (topology/schedule.h), or by NCCL.
// The values travel to each node once.
#include <algorithm>

#include "collectives/collective.h"
#include "collectives/node_pipeline.h"
#include "collectives/operations.h"
#include "topology/schedule.h"

namespace sordino {
namespace {

constexpr std::size_t kSegment = std::size_t{1} << 20;  // bytes of a segment
constexpr std::size_t kSegmentsOfChain = 4;             // from this number of segments on, nodes form a chain

topology::Branch branch_of(const Participants& participants, int root, bool is_long) {
  const Sites sites(participants);
  std::vector<int> leaders{root}, node;  // the leaders of the other nodes are their first ranks
  for (const auto& site : sites.all) {
    const bool is_root = std::find(site.begin(), site.end(), root) != site.end();
    if (!is_root) leaders.push_back(site.front());
    if (&site != &sites.own()) continue;
    node = site;
    if (is_root) std::iter_swap(node.begin(), std::find(node.begin(), node.end(), root));
  }
  return topology::broadcast(leaders, node, participants.me, is_long);
}

}  // namespace

// Sends in segments, so that a rank passes one on while it receives the next.
Task broadcast(Participants& participants, int root, const std::byte* input, std::byte* output, std::size_t bytes) {
  if (participants.channel) {
    if ((participants.me + 1) % participants.size() != root)
      participants.count_sent((participants.me + 1) % participants.size(), bytes);
    co_await nccl::broadcast(*participants.channel, root, input, output, bytes);
    co_return;
  }
  if (participants.me == root && output != input) co_await participants.compute->copy(output, input, bytes);
  if (moves_in_node(participants, false)) {
    const std::size_t size = participants.ranks.size();
    NodeMove move{.input = output, .parts = {size, {{0, 0}}}, .places = {size, output}};
    move.parts[static_cast<std::size_t>(root)][0].bytes = bytes;
    if (bytes > 0) co_await move_in_node(participants, std::move(move));
    co_return;
  }
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

Recipe recipe(const Request& request, const Merged&, const std::vector<int>& ranks, std::size_t me) {
  const auto root = static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), request.root) - ranks.begin());
  const std::size_t bytes = request.tensors[0].bytes();
  Recipe made;
  made.me = me;
  made.shape = request.tensors[0].shape;
  made.takes.resize(ranks.size());
  made.takes.at(root).bytes = made.most = bytes;
  made.gives.resize(ranks.size());
  if (me == root) {
    made.gives.assign(ranks.size(), bytes);
    made.published = bytes;
  }
  return made;
}

bool valid(const Signature& what, std::span<const int> ranks) {
  return std::find(ranks.begin(), ranks.end(), what.root) != ranks.end();
}

}  // namespace

const Collective kBroadcast{
    .name = "broadcast", .only_root_gives = true, .repeats = true, .recipe = recipe, .valid = valid, .run = run};

}  // namespace collectives
}  // namespace sordino
