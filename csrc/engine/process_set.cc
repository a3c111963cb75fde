#include "engine/process_set.h"

#include "collectives/node_blocks.h"
#include "collectives/one_shot_alone.h"
#include "collectives/one_shot_node.h"
#include "collectives/one_shot_nodes.h"
#include "collectives/sites.h"
#include "engine/control.h"

namespace sordino {
namespace {

// Tag of an operation. The numbers of two operations of one set that are in flight between two ranks never differ by
// thousands, so the lower bits may wrap. Sets that run at the same time differ in the upper bits.
Tag tag_of(int set, std::uint64_t sequence) {
  return static_cast<Tag>(tag_set_of(set)) << kTagSequenceBits |
         static_cast<Tag>((sequence << kTagLaneBits) & ((1 << kTagSequenceBits) - 1));
}

}  // namespace

ProcessSet::ProcessSet(int id, std::vector<int> members, Transport& transport, TrafficCounters& traffic,
                       const SetOptions& options)
    : id(id),
      ranks(std::move(members)),
      me(index_of(transport.rank())),
      transport_(transport),
      traffic_(traffic),
      options_(options),
      blocks_(ranks.size()),
      staging_(transport.node_memory()) {
  if (me < 0) return;
  if (me == 0) negotiation.emplace(ranks, options.fusion_bytes, options.given);
  const auto peers = node_peers();
  if (options.slot_bytes == 0 || peers.empty()) {
    open_one_shot();
    return;
  }
  own_block_ = transport.node_memory().allocate_sparse(block_bytes(transport.rank()), SharedBlock::kUnusedEnd);
  SharedBlock* own = blocks_[static_cast<std::size_t>(me)] = reinterpret_cast<SharedBlock*>(own_block_->data);
  own->crowded = options.patience == 0;
  unconnected_.insert(peers.begin(), peers.end());
}

// In a set of several nodes, the block of a node's first rank has room for results of turns (one_shot_nodes.h).
std::size_t ProcessSet::block_bytes(int rank) const {
  const auto& node_of = transport_.node_of();
  const auto is_near = [&](int other) { return node_of[other] == node_of[rank]; };
  const bool one_node = std::all_of(ranks.begin(), ranks.end(), is_near);
  const bool leads = *std::find_if(ranks.begin(), ranks.end(), is_near) == rank;
  return SharedBlock::bytes_for(options_.slot_bytes) + (leads && !one_node ? NodeBlocks::kMostBytes : 0);
}

std::vector<int> ProcessSet::node_peers() const {
  const auto& node_of = transport_.node_of();
  std::vector<int> peers;
  for (const int rank : ranks) {
    if (rank != transport_.rank() && node_of[rank] == node_of[transport_.rank()]) peers.push_back(rank);
  }
  return peers;
}

Location ProcessSet::block_location() const {
  return own_block_ ? transport_.node_memory().locate(own_block_->data, own_block_->bytes) : Location{};
}

void ProcessSet::connect(int rank, const Location& block) {
  if (left_.contains(index_of(rank))) return;
  if (unconnected_.erase(rank) == 0 || block.offset > block.bytes || block.bytes - block.offset < block_bytes(rank))
    throw TransportError("rank " + std::to_string(rank) +
                         " sent the location of a shared block that cannot be its own");
  try {
    blocks_[static_cast<std::size_t>(index_of(rank))] =
        reinterpret_cast<SharedBlock*>(transport_.node_memory().map(rank, block));
  } catch (const MemoryGone&) {
    gone_.insert(rank);  // its process has ended; its goodbye, if any, shows that this is no loss
  }
  if (unconnected_.empty()) open_one_shot();
}

void ProcessSet::open_one_shot() {
  crowded_ =
      std::any_of(blocks_.begin(), blocks_.end(), [](const SharedBlock* block) { return block && block->crowded; });
  const Sites sites(transport_, ranks, me, true);
  const std::vector<int>& own = sites.own();
  std::vector<OneShotSlots*> slots;
  if (own.size() == 1) {
    own_slots_ = std::make_unique_for_overwrite<OneShotSlots>();
    slots.push_back(own_slots_.get());
  } else {
    for (const int member : own) {
      SharedBlock* block = blocks_[static_cast<std::size_t>(member)];
      if (!block) return;
      slots.push_back(&block->one_shot());
    }
  }
  if (ranks.size() == 1) {
    one_shot_ = std::make_unique<OneShotAlone>(std::move(slots), ranks[0]);
    return finish_opening();
  }
  if (sites.all.size() == 1) {
    one_shot_ =
        std::make_unique<OneShotNode>(std::move(slots), own, sites.place, crowded_, ranks, transport_.node_memory());
    return finish_opening();
  }
  std::byte* results = nullptr;
  if (own.size() > 1) {
    SharedBlock* leader = blocks_[static_cast<std::size_t>(own.front())];
    results = reinterpret_cast<std::byte*>(leader) + SharedBlock::bytes_for(options_.slot_bytes);
  }
  if (sites.place > 0) {
    one_shot_ = std::make_unique<OneShotFollower>(std::move(slots), sites, ranks.size(), results);
  } else {
    const auto send = [this](int member, const OneShot::Partial& what, std::span<const std::byte> data) {
      send_partial(member, what, data);
    };
    one_shot_ = std::make_unique<OneShotLeader>(std::move(slots), sites, ranks.size(), results, send);
  }
  finish_opening();
}

// Gives one_shot_ the messages and departures that arrived before it existed.
void ProcessSet::finish_opening() {
  for (const int member : left_) one_shot_->note_left(member);
  for (const auto& [member, what, data] : std::exchange(early_, {})) one_shot_->receive(member, what, data);
}

void ProcessSet::note_left(int index, const Departure& departure) {
  left_.insert(index);
  if (negotiation) negotiation->note_left(index, departure);
  if (one_shot_) one_shot_->note_left(index);
  const int rank = ranks[static_cast<std::size_t>(index)];
  if (unconnected_.erase(rank) == 0) return;
  gone_.insert(rank);  // its block will never arrive
  if (unconnected_.empty()) open_one_shot();
}

void ProcessSet::receive(int member, const OneShot::Partial& what, std::span<const std::byte> data) {
  if (one_shot_) {
    one_shot_->receive(member, what, data);
  } else if (!ready()) {
    early_.push_back({member, what, Bytes(data.begin(), data.end())});
  }
}

void ProcessSet::send_partial(int member, const OneShot::Partial& what, std::span<const std::byte> data) {
  const int to = ranks[static_cast<std::size_t>(member)];
  traffic_.count(transport_, to, data.size());
  Writer writer;
  writer.put(Message::kOneShot).put(id).put(what.turn).put(what.entry.number).put(what.entry.after);
  writer.put(what.call).put(what.late).put_rest(data);
  transport_.post(to, writer.take());
}

void ProcessSet::remember(Running& over) {
  slot_use_ = std::move(over.participants->slot_use);
  if (!one_shot_ || over.decision.repeated || over.participants->size() < static_cast<int>(ranks.size())) return;
  constexpr int kIndexBits = 20;
  // Facts about all pairs of many members take too much memory for the time that they save.
  constexpr std::size_t kMostFacts = 4096;
  const std::size_t most = std::min(over.submissions.size(), std::size_t{1} << kIndexBits);
  for (std::size_t index = 0; index < most; ++index) {
    const Request& request = over.submissions[index].request;
    const Collective& what = collective(request.opcode);
    if (!what.repeats || request.device || over.decision.merged.rows.size() > kMostFacts) continue;
    Repeat repeat{std::string(name_of_repeats(request.name)), Signature::of(request),
                  over.participants->sequence << kIndexBits | index, over.decision.merged,
                  over.participants->direct && !over.participants->used_slots};
    if (what.recipe && request.tensors.size() <= 1 && request.op != ReduceOp::kAdasum) {
      const auto recipe_of = [&](std::size_t member) { return what.recipe(request, repeat.merged, ranks, member); };
      repeat.recipe = recipe_of(static_cast<std::size_t>(me));
      repeat.published = one_shot_->publishes(repeat, recipe_of);
      if (!repeat.carried()) repeat.recipe.published = repeat.recipe.most = 0;
      if (own_block_) own_block_->reserve(SharedBlock::kOneShotBegin + OneShotSlots::used(one_shot_->most_of(repeat)));
      const bool fills_rest = repeat.blocks && std::max(repeat.blocks->bytes(), repeat.blocks->result_bytes()) > 0;
      if (own_block_ && fills_rest && one_shot_->place() == 0) own_block_->reserve(block_bytes(transport_.rank()));
    }
    one_shot_->remember(std::move(repeat));
  }
}

std::vector<int> ProcessSet::unmapped(const std::vector<int>& members) const {
  std::vector<int> found;
  for (const int member : members) {
    const int rank = ranks[static_cast<std::size_t>(member)];
    if (gone_.contains(rank)) found.push_back(rank);
  }
  return found;
}

std::unique_ptr<Participants> ProcessSet::gather(const std::vector<int>& members) {
  ++sequence_;
  const auto place = std::find(members.begin(), members.end(), me);
  if (place == members.end()) return nullptr;
  std::vector<int> their_ranks;
  std::vector<SharedBlock*> blocks;
  for (const int member : members) {
    their_ranks.push_back(ranks[static_cast<std::size_t>(member)]);
    blocks.push_back(blocks_[static_cast<std::size_t>(member)]);
  }
  const auto index = static_cast<int>(place - members.begin());
  auto gathered = std::make_unique<Participants>(transport_, traffic_, std::move(their_ranks), index,
                                                 static_cast<int>(ranks.size()), sequence_, tag_of(id, sequence_));
  gathered->one_node = std::find(blocks.begin(), blocks.end(), nullptr) == blocks.end();
  gathered->blocks = std::move(blocks);
  gathered->own_block = own_block_.get();
  gathered->slot_bytes = options_.slot_bytes;
  gathered->patience = options_.patience;
  gathered->slot_use = slot_use_;
  gathered->staging = &staging_;
  gathered->members = members;
  return gathered;
}

}  // namespace sordino
