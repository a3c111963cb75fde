#include "collectives/process_set.h"

namespace sordino {
namespace {

// Two operations of one set are never under way between the same two ranks with thousands of others between them, and
// sets that run at once differ in the upper bits.
Tag tag_of(int set, std::uint64_t sequence) {
  return static_cast<Tag>(set % kTagSets) << kTagSequenceBits |
         static_cast<Tag>(sequence & ((1 << kTagSequenceBits) - 1));
}

}  // namespace

ProcessSet::ProcessSet(int id, std::vector<int> members, Transport& transport, std::size_t chunk, int patience,
                       std::size_t fusion_bytes)
    : id(id),
      ranks(std::move(members)),
      me(index_of(transport.rank())),
      transport_(transport),
      chunk_(chunk),
      patience_(patience),
      desks_(ranks.size()) {
  if (me < 0) return;
  if (me == 0) negotiation.emplace(ranks, fusion_bytes);
  const auto peers = node_peers();
  if (chunk == 0 || peers.empty()) return;
  own_desk_ = transport.node_memory().allocate(Desk::bytes_for(chunk));
  desks_[static_cast<std::size_t>(me)] = reinterpret_cast<Desk*>(own_desk_->data);
  strangers_.insert(peers.begin(), peers.end());
}

std::vector<int> ProcessSet::node_peers() const {
  const auto& node_of = transport_.node_of();
  std::vector<int> peers;
  for (const int rank : ranks) {
    if (rank != transport_.rank() && node_of[rank] == node_of[transport_.rank()]) peers.push_back(rank);
  }
  return peers;
}

Location ProcessSet::desk_location() const {
  return own_desk_ ? transport_.node_memory().locate(own_desk_->data, own_desk_->bytes) : Location{};
}

void ProcessSet::meet(int rank, const Location& desk) {
  if (strangers_.erase(rank) == 0 || desk.offset > desk.bytes || desk.bytes - desk.offset < Desk::bytes_for(chunk_))
    throw TransportError("rank " + std::to_string(rank) + " tells of a desk that it cannot have");
  try {
    desks_[static_cast<std::size_t>(index_of(rank))] =
        reinterpret_cast<Desk*>(transport_.node_memory().map(rank, desk));
  } catch (const TransportError&) {
    // Its process has ended. Whether that is a loss, its goodbye tells; no operation will have it as a participant.
  }
}

std::unique_ptr<Team> ProcessSet::make_team(const std::vector<int>& participants, Traffic& traffic) {
  ++sequence_;
  const auto place = std::find(participants.begin(), participants.end(), me);
  if (place == participants.end()) return nullptr;
  std::vector<int> team_ranks;
  std::vector<Desk*> desks;
  for (const int member : participants) {
    team_ranks.push_back(ranks[static_cast<std::size_t>(member)]);
    desks.push_back(desks_[static_cast<std::size_t>(member)]);
  }
  const auto index = static_cast<int>(place - participants.begin());
  auto team = std::make_unique<Team>(transport_, traffic, std::move(team_ranks), index, static_cast<int>(ranks.size()),
                                     sequence_, tag_of(id, sequence_));
  team->one_node = std::find(desks.begin(), desks.end(), nullptr) == desks.end();
  team->desks = std::move(desks);
  team->chunk = chunk_;
  team->patience = patience_;
  team->last_staged = last_staged_;
  team->last_staged_desks = last_staged_desks_;
  team->shares_devices = shares_devices_;
  return team;
}

}  // namespace sordino
