#include "membership/epoch_transport.h"

#include <utility>

namespace sordino::membership {
namespace {

// Memory that the members of an epoch share within a node. It belongs to the transport of the whole job.
class EpochMemory : public NodeMemory {
 public:
  EpochMemory(NodeMemory& below, std::vector<int> members)
      : NodeMemory(below), below_(below), members_(std::move(members)) {}
  std::shared_ptr<Segment> allocate(std::size_t bytes) override { return below_.allocate(bytes); }
  std::shared_ptr<Segment> allocate_sparse(std::size_t bytes, std::size_t reserved) override {
    return below_.allocate_sparse(bytes, reserved);
  }
  std::shared_ptr<Segment> adopt(std::byte* data, std::size_t bytes, int fd) override {
    return below_.adopt(data, bytes, fd);
  }
  bool offers_private(const void* data, std::size_t bytes, Sure sure) const override {
    return below_.offers_private(data, bytes, sure);
  }

 protected:
  std::byte* map_host(int rank, const Location& location) override {
    return with_member(rank, [&](int member) { return below_.map(member, location); });
  }
  void read_private(int rank, std::uint64_t address, std::span<std::byte> to) override {
    const Location place{.segment = Location::kPrivate, .bytes = to.size(), .key = address};
    with_member(rank, [&](int member) { below_.copy(member, place, to); });
  }
  void unmap_host(int rank, std::uint64_t segment) override {
    below_.unmap(members_[static_cast<std::size_t>(rank)], segment);
  }

 private:
  // Calls `use` with the number of `rank` below. Memory that is gone is that of `rank`.
  template <typename Use>
  auto with_member(int rank, const Use& use) const -> decltype(use(rank)) {
    try {
      return use(members_[static_cast<std::size_t>(rank)]);
    } catch (const MemoryGone& error) {
      throw MemoryGone(error.what(), rank);
    }
  }

  NodeMemory& below_;
  const std::vector<int> members_;
};

PeerLost unreachable(int peer, const std::string& host, const std::string& cause) {
  return PeerLost("rank " + std::to_string(peer) + " on " + host + " is lost: " + cause, {peer});
}

// A transfer whose errors name a lost peer by its rank in the epoch.
class EpochTransfer : public Transfer {
 public:
  EpochTransfer(std::unique_ptr<Transfer> transfer, int peer, std::string host)
      : transfer_(std::move(transfer)), peer_(peer), host_(std::move(host)) {}
  bool test() override {
    try {
      return transfer_->test();
    } catch (const PeerLost& error) {
      throw unreachable(peer_, host_, "a transfer with it has failed");
    }
  }

 private:
  const std::unique_ptr<Transfer> transfer_;
  const int peer_;
  const std::string host_;
};

}  // namespace

EpochTransport::EpochTransport(std::shared_ptr<Membership> membership, View view)
    : membership_(std::move(membership)),
      view_(std::move(view)),
      rank_(view_.place_of(below().rank())),
      memory_(std::make_unique<EpochMemory>(below().node_memory(), view_.members)) {
  std::vector<int> seen;
  for (const int member : view_.members) {
    const int node = below().node_of()[static_cast<std::size_t>(member)];
    auto found = std::find(seen.begin(), seen.end(), node);
    node_of_.push_back(static_cast<int>(found - seen.begin()));
    if (found == seen.end()) seen.push_back(node);
  }
}

bool EpochTransport::poll(const Sink& sink) {
  const bool moved = membership_->poll(view_.epoch, [&](int from, std::span<const std::byte> message) {
    if (const int rank = view_.place_of(from); rank >= 0) sink(rank, message);
  });
  if (!told_ && membership_->over(view_.epoch)) {
    told_ = true;
    std::rethrow_exception(membership_->reason(view_));
  }
  return moved;
}

// Maps the tags of an epoch to values that no earlier epoch has used, so that its transfers never match leftovers.
Tag EpochTransport::shifted(Tag tag) {
  const auto set = static_cast<int>(tag >> kTagSequenceBits);
  if (set == kTagSets) return tag;  // a service's tag, which is counted through all epochs
  membership_->count_tags(view_.first_tag + set + 1);
  const auto moved = static_cast<Tag>((view_.first_tag + set) % kTagSets);
  return moved << kTagSequenceBits | (tag & ((1u << kTagSequenceBits) - 1));
}

std::unique_ptr<Transfer> EpochTransport::watched(std::unique_ptr<Transfer> transfer, int peer) const {
  return std::make_unique<EpochTransfer>(std::move(transfer), peer, host_of(peer));
}

std::unique_ptr<Transfer> EpochTransport::send(int to, Tag tag, std::span<const std::byte> data) {
  try {
    return watched(below().send(member(to), shifted(tag), data), to);
  } catch (const PeerLost&) {
    throw unreachable(to, host_of(to), "nothing can be sent to it");
  }
}

std::unique_ptr<Transfer> EpochTransport::receive(int from, Tag tag, std::span<std::byte> data) {
  try {
    return watched(below().receive(member(from), shifted(tag), data), from);
  } catch (const PeerLost&) {
    throw unreachable(from, host_of(from), "nothing can be received from it");
  }
}

std::vector<Loss> EpochTransport::take_losses() {
  std::vector<Loss> losses;
  for (const Loss& loss : membership_->take_losses()) {
    if (const int rank = view_.place_of(loss.rank); rank >= 0) losses.push_back({rank, loss.cause, loss.certain});
  }
  return losses;
}

}  // namespace sordino::membership
