#include "engine/process_set.h"

namespace sordino {
namespace {

// Two operations of one set are never under way between the same two ranks with thousands of others between them, and
// sets that run at once differ in the upper bits.
Tag tag_of(int set, std::uint64_t sequence) {
  return static_cast<Tag>(set % kTagSets) << kTagSequenceBits |
         static_cast<Tag>((sequence << kTagLaneBits) & ((1 << kTagSequenceBits) - 1));
}

// What a blocking call would say of an operation of this name; empty where none would.
std::string_view name_again(std::string_view name) {
  const std::string_view label = kAllreduceLabel;
  if (!name.starts_with(label)) return {};
  name.remove_prefix(label.size());
  return name.starts_with(kUnnamed) ? kUnnamed : name;  // in order, whatever their number
}

}  // namespace

ProcessSet::ProcessSet(int id, std::vector<int> members, Transport& transport, const SetOptions& options)
    : id(id),
      ranks(std::move(members)),
      me(index_of(transport.rank())),
      transport_(transport),
      options_(options),
      blocks_(ranks.size()),
      staging_(transport.node_memory()) {
  if (me < 0) return;
  if (me == 0) negotiation.emplace(ranks, options.fusion_bytes);
  const auto peers = node_peers();
  if (options.slot_bytes == 0 || peers.empty()) return;
  own_block_ = transport.node_memory().allocate(SharedBlock::bytes_for(options.slot_bytes));
  blocks_[static_cast<std::size_t>(me)] = reinterpret_cast<SharedBlock*>(own_block_->data);
  unconnected_.insert(peers.begin(), peers.end());
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
  if (unconnected_.erase(rank) == 0 || block.offset > block.bytes ||
      block.bytes - block.offset < SharedBlock::bytes_for(options_.slot_bytes))
    throw TransportError("rank " + std::to_string(rank) + " tells of a shared block that it cannot have");
  try {
    blocks_[static_cast<std::size_t>(index_of(rank))] =
        reinterpret_cast<SharedBlock*>(transport_.node_memory().map(rank, block));
  } catch (const TransportError&) {
    // Its process has ended. Whether that is a loss, its goodbye tells; no operation will have it as a participant.
  }
  if (unconnected_.empty()) open_one_shot();
}

void ProcessSet::open_one_shot() {
  std::vector<OneShotSlots*> slots;
  for (SharedBlock* block : blocks_) {
    if (!block) return;
    slots.push_back(&block->one_shot());
  }
  one_shot_.emplace(std::move(slots), static_cast<std::size_t>(me));
}

void ProcessSet::remember(Running& over) {
  slot_use_ = std::move(over.participants->slot_use);
  shares_devices_ = over.participants->shares_devices;
  if (!one_shot_ || over.participants->size() < static_cast<int>(ranks.size())) return;
  constexpr int kIndexBits = 20;
  const std::size_t most = std::min(over.submissions.size(), std::size_t{1} << kIndexBits);
  for (std::size_t index = 0; index < most; ++index) {
    const Request& request = over.submissions[index].request;
    if (request.opcode != Opcode::kAllreduce || request.device || request.tensors.size() != 1 ||
        request.op == ReduceOp::kAdasum || !OneShot::fits(request.tensors[0].bytes(), ranks.size()))
      continue;
    const std::string_view name = name_again(request.name);
    if (name.empty()) continue;
    const Tensor& tensor = request.tensors[0];
    one_shot_->remember(name, {request.op, tensor.dtype, request.prescale, request.postscale, tensor.shape},
                        over.participants->sequence << kIndexBits | index);
  }
}

std::unique_ptr<Participants> ProcessSet::gather(const std::vector<int>& members, Traffic& traffic) {
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
  auto gathered = std::make_unique<Participants>(transport_, traffic, std::move(their_ranks), index,
                                                 static_cast<int>(ranks.size()), sequence_, tag_of(id, sequence_));
  gathered->one_node = std::find(blocks.begin(), blocks.end(), nullptr) == blocks.end();
  gathered->blocks = std::move(blocks);
  gathered->slot_bytes = options_.slot_bytes;
  gathered->patience = options_.patience;
  gathered->slot_use = slot_use_;
  gathered->staging = &staging_;
  gathered->shares_devices = shares_devices_;
  return gathered;
}

}  // namespace sordino
