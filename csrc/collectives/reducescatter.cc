// Reduce-scatter: each rank gets a part of the fold of all ranks' values. The ranks of one node give each other their
// parts through shared memory. With more nodes, the ranks of a node fold in their memory first, and the node's values
// of a part go to its receiver once. So a link carries as much as with one rank per node. If no ranks share memory, or
// the memory is a device's, parts go by messages between pairs, or by NCCL.
#include <algorithm>
#include <utility>

#include "collectives/collective.h"
#include "collectives/nccl_scaling.h"
#include "collectives/node_pipeline.h"
#include "collectives/operations.h"
#include "collectives/shared_tensors.h"

namespace sordino {
namespace {

// The values to fold, and their parts.
struct Parts {
  DType dtype;
  const std::vector<std::size_t>& bounds;
  ReduceOp op;

  std::size_t count(int index) const {
    const auto part = static_cast<std::size_t>(index);
    return bounds[part + 1] - bounds[part];
  }
  std::size_t bytes(int index) const { return count(index) * size_of(dtype); }
  std::size_t begin(int index) const { return bounds[static_cast<std::size_t>(index)] * size_of(dtype); }
};

Task reducescatter_in_node(Participants& participants, const Parts& parts, const std::byte* input, std::byte* output,
                           double pre, double post) {
  const std::size_t width = size_of(parts.dtype);
  std::vector<const std::byte*> values;
  NodeMove move{.input = input, .parts = {}};
  move.fold = [&](std::size_t at, const std::vector<NodeMove::Source>& sources) {
    values.clear();
    for (const NodeMove::Source& source : sources) values.push_back(source.data());
    std::byte* into = output + at;
    kernels::reduce(parts.op, parts.dtype, values, {&into, 1}, sources.front().size() / width, pre, post);
  };
  std::vector<NodeMove::Part> all;
  for (int peer = 0; peer < participants.size(); ++peer) all.push_back({parts.begin(peer), parts.bytes(peer)});
  move.parts.assign(all.size(), all);
  co_await move_in_node(participants, std::move(move));
}

// For each rank of other nodes, one rank of this node folds its part and sends it there.
Task reducescatter_on_nodes(Participants& participants, const Sites& sites, const Parts& parts, const std::byte* input,
                            std::byte* output, double pre, double post) {
  constexpr std::uint64_t kStage = 1;
  const std::size_t whole = parts.bounds.back() * size_of(parts.dtype), nodes = sites.all.size();
  std::vector<const std::byte*> inputs{input};
  if (sites.own().size() > 1) {
    std::byte* copy = nullptr;
    co_await take_staging(participants, std::max<std::size_t>(whole, 1), copy);
    std::copy_n(input, whole, copy);
    participants.reach(&SharedBlock::offered, kStage);
    co_await participants.all_reached(&SharedBlock::offered, kStage);
    inputs.clear();
    for (const int index : sites.own()) inputs.push_back(staging_of(participants, index));
  }
  const auto fold = [&](int index, std::byte* into) {
    std::vector<const std::byte*> sources;
    for (const std::byte* one : inputs) sources.push_back(one + parts.begin(index));
    kernels::reduce(parts.op, parts.dtype, sources, {&into, 1}, parts.count(index), pre, 1);
  };
  // By node: its fold of my part. My node's own fold comes last, when no rank waits for another message of this rank.
  const auto received = participants.compute->scratch(nodes * parts.bytes(participants.me));
  std::vector<const std::byte*> folded;
  std::vector<std::pair<int, std::unique_ptr<Transfer>>> transfers;
  for (std::size_t site = 0; site < nodes; ++site) {
    std::byte* place = received.get() + site * parts.bytes(participants.me);
    folded.push_back(place);
    if (site == sites.mine) continue;
    const int peer = sites.counterpart(site, sites.place);
    transfers.emplace_back(peer, participants.receive(peer, std::span(place, parts.bytes(participants.me))));
  }
  std::vector<std::shared_ptr<std::byte>> sent;
  for (std::size_t site = 0; site < nodes; ++site) {
    if (site == sites.mine) continue;
    for (std::size_t place = sites.place; place < sites.all[site].size(); place += sites.own().size()) {
      const int peer = sites.all[site][place];
      sent.push_back(participants.compute->scratch(parts.bytes(peer)));
      fold(peer, sent.back().get());
      transfers.emplace_back(peer, participants.send(peer, std::span(sent.back().get(), parts.bytes(peer))));
    }
  }
  fold(participants.me, received.get() + sites.mine * parts.bytes(participants.me));
  for (auto& [peer, transfer] : transfers) co_await participants.finished(*transfer, peer);
  kernels::reduce(parts.op, parts.dtype, folded, {&output, 1}, parts.count(participants.me), 1, post);
  if (sites.own().size() == 1) co_return;
  for (const int peer : sites.own()) {
    if (peer != participants.me) participants.count_sent(peer, whole / sites.own().size());
  }
  participants.reach(&SharedBlock::finished, kStage);
  slots_used(participants, kStage);
  participants.stages_used += kStage;
}

}  // namespace

// Each rank sends its values of a part to the part's rank, which folds them once, in rank order, at full precision.
Task reducescatter(Participants& participants, DType dtype, const std::byte* input, std::vector<std::size_t> bounds,
                   std::byte* output, ReduceOp op, double pre, double post) {
  if (participants.channel) {
    for (std::size_t peer = 0; peer + 1 < bounds.size(); ++peer) {
      if (static_cast<int>(peer) == participants.me) continue;
      participants.count_sent(static_cast<int>(peer), (bounds[peer + 1] - bounds[peer]) * size_of(dtype));
    }
    co_await nccl::reducescatter(*participants.channel, dtype, input, std::move(bounds), output, op, pre, post);
    co_return;
  }
  if (moves_in_node(participants, true)) {
    co_await reducescatter_in_node(participants, {dtype, bounds, op}, input, output, pre, post);
    co_return;
  }
  const Sites sites(participants);
  if (sites.some_share()) {
    divide_first(dtype, op, pre, post);
    co_await reducescatter_on_nodes(participants, sites, {dtype, bounds, op}, input, output, pre, post);
    co_return;
  }
  const std::size_t width = size_of(dtype), parts = static_cast<std::size_t>(participants.size()),
                    me = static_cast<std::size_t>(participants.me);
  const auto size_at = [&](std::size_t index) { return (bounds[index + 1] - bounds[index]) * width; };
  std::vector<std::size_t> send_sizes, receive_sizes(parts, size_at(me));
  for (std::size_t index = 0; index < parts; ++index) send_sizes.push_back(size_at(index));
  const auto received = participants.compute->scratch(parts * size_at(me));
  co_await participants.compute->idle();
  co_await alltoall(participants, input, send_sizes, received.get(), receive_sizes);
  std::vector<const std::byte*> sources;
  for (std::size_t index = 0; index < parts; ++index) sources.push_back(received.get() + index * size_at(me));
  std::byte* destinations[] = {output};
  co_await participants.compute->reduce(op, dtype, sources, destinations, bounds[me + 1] - bounds[me], pre, post);
}

namespace nccl {

Task reducescatter(Channel& channel, DType dtype, const std::byte* input, std::vector<std::size_t> bounds,
                   std::byte* output, ReduceOp op, double pre, double post) {
  Communicator& communicator = channel.communicator();
  const Folding how(dtype, op, pre, post, communicator.size());
  const std::size_t width = size_of(dtype);
  std::vector<std::size_t> counts;
  for (std::size_t part = 0; part + 1 < bounds.size(); ++part) counts.push_back(bounds[part + 1] - bounds[part]);
  if (bounds.back() == 0) co_return;
  co_await channel.ready();
  if (how.pre != 1) {
    std::byte* scaled = channel.scratch(bounds.back() * width);
    scale(channel, dtype, input, scaled, bounds.back(), how.pre);
    input = scaled;
  }
  if (std::equal(counts.begin() + 1, counts.end(), counts.begin())) {
    communicator.reduce_scatter(input, output, counts[0], dtype, how.op, channel.stream());
  } else {
    Group group(communicator);
    for (int root = 0; root < communicator.size(); ++root) {
      const auto part = static_cast<std::size_t>(root);
      communicator.reduce(input + bounds[part] * width, root == communicator.rank() ? output : nullptr, counts[part],
                          dtype, how.op, root, channel.stream());
    }
    group.end();
  }
  co_await channel.ready();
  const std::size_t mine = counts[static_cast<std::size_t>(communicator.rank())];
  if (how.post != 1 && mine > 0) scale(channel, dtype, output, output, mine, how.post);
}

}  // namespace nccl

namespace collectives {
namespace {

// First row of each of `parts` members, and the end of the last. The first members get one row more, as in Horovod.
std::vector<std::size_t> first_rows(std::int64_t rows, std::int64_t parts) {
  std::vector<std::size_t> bounds;
  for (std::int64_t index = 0; index <= parts; ++index)
    bounds.push_back(static_cast<std::size_t>(index * (rows / parts) + std::min(index, rows % parts)));
  return bounds;
}

Recipe recipe(const Request& request, const Merged&, const std::vector<int>& ranks, std::size_t me) {
  const Tensor& tensor = request.tensors[0];
  const auto bounds = first_rows(tensor.shape[0], static_cast<std::int64_t>(ranks.size()));
  const auto bytes = [&](std::size_t member) { return (bounds[member + 1] - bounds[member]) * tensor.row_bytes(); };
  Recipe made;
  made.me = me;
  made.folds = true;
  made.takes.assign(ranks.size(), {bounds[me] * tensor.row_bytes(), bytes(me)});
  for (std::size_t member = 0; member < ranks.size(); ++member) made.gives.push_back(bytes(member));
  made.published = made.most = tensor.bytes();
  made.shape = tensor.shape;
  made.shape[0] = static_cast<std::int64_t>(bounds[me + 1] - bounds[me]);
  return made;
}

Task run(Operation& operation) {
  Participants& participants = *operation.participants;
  const Submission& submission = operation.submissions.front();
  const Request& request = submission.request;
  const auto me = static_cast<std::size_t>(participants.me);
  for (const Tensor& tensor : request.tensors) {
    std::vector<std::size_t> bounds = first_rows(tensor.shape[0], participants.size());
    std::vector<std::int64_t> shape = tensor.shape;
    shape[0] = static_cast<std::int64_t>(bounds[me + 1] - bounds[me]);
    const std::size_t bytes = static_cast<std::size_t>(shape[0]) * tensor.row_bytes();
    for (std::size_t& bound : bounds) bound *= tensor.row_bytes() / size_of(tensor.dtype);  // in elements
    std::byte* output = result_memory(*submission.handle, operation, tensor, std::move(shape), bytes);
    const auto [op, post] = folding_of(request.op, tensor.dtype, request.postscale, participants.set_size);
    co_await participants.compute->idle();
    co_await reducescatter(participants, tensor.dtype, tensor.input, std::move(bounds), output, op, request.prescale,
                           post);
  }
}

}  // namespace

const Collective kReducescatter{
    .name = "reducescatter", .reduces = true, .repeats = true, .recipe = recipe, .valid = has_rows, .run = run};

}  // namespace collectives
}  // namespace sordino
