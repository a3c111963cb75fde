// All-gather: each rank gets the values of all ranks, one after the other. A block goes to one rank of each other node,
// and the ranks of a node copy from each other's memory. So a link carries each block that its node needs once. Few
// bytes among many nodes go by recursive doubling between the first ranks of the nodes (topology::gathers_by_doubling).
// If no ranks share memory, or the memory is a device's, blocks go by messages along a ring, or by NCCL.
#include <algorithm>
#include <numeric>

#include "collectives/collective.h"
#include "collectives/node_pipeline.h"
#include "collectives/operations.h"
#include "collectives/shared_tensors.h"
#include "topology/schedule.h"

namespace sordino {
namespace {

// Position of each participant's block in the whole.
struct Blocks {
  explicit Blocks(const std::vector<std::size_t>& sizes) : sizes(sizes), starts(sizes.size() + 1) {
    for (std::size_t i = 0; i < sizes.size(); ++i) starts[i + 1] = starts[i] + sizes[i];
  }
  std::span<std::byte> in(std::byte* whole, int index) const {
    return {whole + starts[static_cast<std::size_t>(index)], sizes[static_cast<std::size_t>(index)]};
  }
  std::size_t bytes() const { return starts.back(); }
  const std::vector<std::size_t>& sizes;
  std::vector<std::size_t> starts;
};

// Exchanges the blocks of nodes between their first ranks. `whole` has the blocks of this node; at the end, all blocks.
Task double_blocks(Participants& participants, const Sites& sites, const Blocks& blocks, std::byte* whole) {
  const auto size = static_cast<int>(sites.all.size()), mine = static_cast<int>(sites.mine);
  // Calls visit(block) for all blocks of the nodes that `site` has combined before a round.
  const auto each = [&](int site, int round, auto&& visit) {
    for (const int one : topology::combined_before(size, site, round)) {
      for (const int index : sites.all[static_cast<std::size_t>(one)]) visit(blocks.in(whole, index));
    }
  };
  for (const auto& [partner, gives, brings, round] : topology::doubling(size, mine)) {
    const bool takes = brings != topology::Brings::kNothing;
    Bytes out, in;
    if (gives)
      each(mine, round, [&](std::span<std::byte> block) { out.insert(out.end(), block.begin(), block.end()); });
    std::size_t expected = 0;
    if (takes) each(partner, round, [&](std::span<std::byte> block) { expected += block.size(); });
    in.resize(expected);
    const int peer = sites.all[static_cast<std::size_t>(partner)].front();
    std::unique_ptr<Transfer> receive, send;
    if (takes) receive = participants.receive(peer, in);
    if (gives) send = participants.send(peer, out);
    if (takes) co_await participants.finished(*receive, peer);
    if (gives) co_await participants.finished(*send, peer);
    if (!takes) continue;
    std::span<const std::byte> rest(in);
    each(partner, round, [&](std::span<std::byte> block) {
      std::copy_n(rest.begin(), block.size(), block.begin());
      rest = rest.subspan(block.size());
    });
  }
}

// The first rank of each node collects the blocks of its node, and the others copy all blocks from its memory.
Task gather_by_doubling(Participants& participants, const Sites& sites, const std::byte* input, const Blocks& blocks,
                        std::byte* output) {
  constexpr std::uint64_t kStage = 1;
  const std::size_t own = blocks.sizes[static_cast<std::size_t>(participants.me)];
  if (sites.own().size() == 1) {
    std::copy_n(input, own, blocks.in(output, participants.me).data());
    co_await double_blocks(participants, sites, blocks, output);
    co_return;
  }
  const int first = sites.own().front();
  const bool leads = participants.me == first;
  const std::size_t offered = leads ? blocks.bytes() : own;
  std::byte* memory = nullptr;  // for all blocks on the first rank, else for this rank's block
  co_await take_staging(participants, std::max<std::size_t>(offered, 1), memory);
  std::copy_n(input, own, leads ? blocks.in(memory, first).data() : memory);
  participants.reach(&SharedBlock::offered, kStage);
  if (leads) {
    co_await participants.all_reached(&SharedBlock::offered, kStage);
    for (const int index : sites.own()) {
      const std::span block = blocks.in(memory, index);
      if (index != first) std::copy_n(staging_of(participants, index), block.size(), block.data());
    }
    co_await double_blocks(participants, sites, blocks, memory);
    participants.reach(&SharedBlock::reduced, kStage);
  } else {
    co_await participants.reached(first, &SharedBlock::reduced, kStage);
  }
  std::copy_n(staging_of(participants, first), blocks.bytes(), output);
  for (const int index : sites.own()) {
    if (index != participants.me && (leads || index == first)) participants.count_sent(index, offered);
  }
  participants.reach(&SharedBlock::finished, kStage);
  slots_used(participants, kStage);
  participants.stages_used += kStage;
}

// Each rank of this node receives some blocks of other nodes, and keeps them behind its own, for its node.
Task gather_on_nodes(Participants& participants, const Sites& sites, const std::byte* input, const Blocks& blocks,
                     std::byte* output) {
  constexpr std::uint64_t kStage = 1;
  const bool alone = sites.own().size() == 1;
  // Owners of the blocks that each rank of this node keeps, in order.
  std::vector<std::vector<int>> held(sites.own().size());
  for (std::size_t place = 0; place < held.size(); ++place) held[place].push_back(sites.own()[place]);
  for (std::size_t site = 0; site < sites.all.size(); ++site) {
    if (site == sites.mine) continue;
    for (std::size_t place = 0; place < sites.all[site].size(); ++place)
      held[place % held.size()].push_back(sites.all[site][place]);
  }
  std::byte* kept = nullptr;
  const std::vector<int>& mine = held[sites.place];
  if (!alone) {
    std::size_t bytes = 0;
    for (const int index : mine) bytes += blocks.sizes[static_cast<std::size_t>(index)];
    co_await take_staging(participants, std::max<std::size_t>(bytes, 1), kept);
  }
  std::vector<std::pair<int, std::unique_ptr<Transfer>>> transfers;
  std::byte* at = kept;
  for (const int index : mine) {
    std::span block = blocks.in(output, index);
    if (!alone) {
      block = {at, block.size()};
      at += block.size();
    }
    if (index == participants.me) {
      std::copy_n(input, block.size(), block.data());
    } else {
      transfers.emplace_back(index, participants.receive(index, block));
    }
  }
  const std::span own(input, blocks.sizes[static_cast<std::size_t>(participants.me)]);
  for (std::size_t site = 0; site < sites.all.size(); ++site) {
    if (site == sites.mine) continue;
    const int peer = sites.counterpart(site, sites.place);
    transfers.emplace_back(peer, participants.send(peer, own));
  }
  for (auto& [peer, transfer] : transfers) co_await participants.finished(*transfer, peer);
  if (alone) co_return;
  participants.reach(&SharedBlock::offered, kStage);
  co_await participants.all_reached(&SharedBlock::offered, kStage);
  for (std::size_t place = 0; place < held.size(); ++place) {
    const std::byte* from = staging_of(participants, sites.own()[place]);
    std::size_t bytes = 0;
    for (const int index : held[place]) {
      const std::span block = blocks.in(output, index);
      std::copy_n(from + bytes, block.size(), block.data());
      bytes += block.size();
    }
    if (place != sites.place) participants.count_sent(sites.own()[place], static_cast<std::size_t>(at - kept));
  }
  participants.reach(&SharedBlock::finished, kStage);
  slots_used(participants, kStage);
  participants.stages_used += kStage;
}

}  // namespace

// A ring: in step s each rank passes on the block that it received in step s - 1.
Task allgather(Participants& participants, const std::byte* input, std::vector<std::size_t> sizes, std::byte* output) {
  if (participants.channel) {
    for (int step = 0; step < participants.size() - 1; ++step) {
      const auto passed_on = topology::ring_step(participants.size(), participants.me, step).give;
      participants.count_sent((participants.me + 1) % participants.size(), sizes[static_cast<std::size_t>(passed_on)]);
    }
    co_await nccl::allgather(*participants.channel, input, std::move(sizes), output);
    co_return;
  }
  const int size = participants.size();
  const Blocks blocks(sizes);
  if (moves_in_node(participants, false)) {
    NodeMove move{.input = input, .parts = {}};
    for (int index = 0; index < size; ++index) {
      const std::span<std::byte> block = blocks.in(output, index);
      move.parts.push_back({{0, block.size()}});
      move.places.push_back(block.data());
    }
    co_await move_in_node(participants, std::move(move));
    co_return;
  }
  const Sites sites(participants);
  if (sites.on_host && topology::gathers_by_doubling(sites.all.size(), sites.some_share(), blocks.bytes())) {
    co_await gather_by_doubling(participants, sites, input, blocks, output);
    co_return;
  }
  if (sites.some_share()) {
    co_await gather_on_nodes(participants, sites, input, blocks, output);
    co_return;
  }
  const int me = participants.me;
  co_await participants.compute->copy(blocks.in(output, me).data(), input, blocks.in(output, me).size());
  for (int step = 0; step < size - 1; ++step) {
    const auto [give, take] = topology::ring_step(size, me, step);
    co_await participants.exchange((me + 1) % size, blocks.in(output, give), (me + size - 1) % size,
                                   blocks.in(output, take));
  }
}

namespace nccl {

Task allgather(Channel& channel, const std::byte* input, std::vector<std::size_t> sizes, std::byte* output) {
  Communicator& communicator = channel.communicator();
  co_await channel.ready();
  if (std::equal(sizes.begin() + 1, sizes.end(), sizes.begin())) {
    communicator.all_gather(input, output, sizes[0], channel.stream());
  } else {
    Group group(communicator);
    for (int root = 0; root < communicator.size(); ++root) {
      const std::size_t bytes = sizes[static_cast<std::size_t>(root)];
      communicator.broadcast(root == communicator.rank() ? input : output, output, bytes, root, channel.stream());
      output += bytes;
    }
    group.end();
  }
  co_await channel.ready();
}

}  // namespace nccl

namespace collectives {
namespace {

void merge(const Announced& announced, Merged& merged) {
  for (std::size_t tensor = 0; tensor < announced.all.front()->shapes.size(); ++tensor) {
    for (const Announcement* said : announced.all) merged.rows.push_back(said->shapes[tensor][0]);
  }
}

bool fits(const Request& request, const Merged& merged, std::size_t parts, std::size_t me) {
  if (merged.rows.size() != request.tensors.size() * parts) return false;
  for (std::size_t index = 0; index < request.tensors.size(); ++index) {
    const Tensor& tensor = request.tensors[index];
    const std::span rows(merged.rows.data() + index * parts, parts);
    if (!rows_fit(tensor, rows) || rows[me] != tensor.shape[0]) return false;
  }
  return true;
}

Task run(Operation& operation) {
  Participants& participants = *operation.participants;
  const Submission& submission = operation.submissions.front();
  const auto parts = static_cast<std::size_t>(participants.size());
  for (std::size_t index = 0; index < submission.request.tensors.size(); ++index) {
    const Tensor& tensor = submission.request.tensors[index];
    const std::span rows(operation.decision.merged.rows.data() + index * parts, parts);
    std::vector<std::size_t> sizes;
    for (const std::int64_t count : rows) sizes.push_back(static_cast<std::size_t>(count) * tensor.row_bytes());
    std::vector<std::int64_t> shape = tensor.shape;
    shape[0] = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
    std::byte* output = result_memory(*submission.handle, operation, tensor, std::move(shape), total);
    co_await participants.compute->idle();
    co_await allgather(participants, tensor.input, std::move(sizes), output);
    submission.handle->rows.insert(submission.handle->rows.end(), rows.begin(), rows.end());
  }
}

Recipe recipe(const Request& request, const Merged& merged, const std::vector<int>&, std::size_t me) {
  const Tensor& tensor = request.tensors[0];
  Recipe made;
  made.me = me;
  made.shape = tensor.shape;
  made.shape[0] = 0;
  made.rows = merged.rows;
  for (const std::int64_t rows : merged.rows) {
    made.takes.push_back({0, static_cast<std::size_t>(rows) * tensor.row_bytes()});
    made.most = std::max(made.most, made.takes.back().bytes);
    made.shape[0] += rows;
  }
  made.published = made.takes[me].bytes;
  made.gives.assign(merged.rows.size(), made.published);
  return made;
}

}  // namespace

const Collective kAllgather{
    .name = "allgather",
    .rows_may_differ = true,
    .repeats = true,
    .merge = merge,
    .fits = fits,
    .recipe = recipe,
    .valid = has_rows,
    .run = run,
};

}  // namespace collectives
}  // namespace sordino
