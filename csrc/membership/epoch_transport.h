// Transport between the members of one epoch. A rank is a position in view.members. When the epoch is over, poll()
// throws the reason once. Later calls deliver nothing, but still poll the membership.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "membership/membership.h"
#include "transport/transport.h"

namespace sordino::membership {

class EpochTransport : public Transport {
 public:
  EpochTransport(std::shared_ptr<Membership> membership, View view);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(view_.members.size()); }
  const std::vector<int>& node_of() const override { return node_of_; }
  double ranks_per_core() const override { return below().ranks_per_core(); }
  std::string host_of(int rank) const override { return below().host_of(member(rank)); }
  int process_of(int rank) const override { return below().process_of(member(rank)); }
  std::string name() const override { return below().name(); }

  void post(int to, Bytes message) override { membership_->post(view_.epoch, member(to), message); }
  bool poll(const Sink& sink) override;
  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override;
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) override;
  bool idle() const override { return below().idle(); }

  NodeMemory& node_memory() override { return *memory_; }
  bool node_shares_memory(int rank) const override { return below().node_shares_memory(member(rank)); }
  bool takes_device_memory() const override { return below().takes_device_memory(); }

  std::uint32_t ticket() override { return below().ticket(); }
  void sleep(std::uint32_t ticket, std::chrono::microseconds limit) override { below().sleep(ticket, limit); }
  void ring(int rank) override { below().ring(member(rank)); }
  void keep(std::shared_ptr<Segment> segment) override { below().keep(std::move(segment)); }
  bool rings_always() const override { return below().rings_always(); }

  std::vector<Loss> take_losses() override;
  void tolerate_losses() override { membership_->tolerate_losses(); }
  void abandon() override { below().abandon(); }

 private:
  Transport& below() const { return membership_->transport(); }
  int member(int rank) const { return view_.members[static_cast<std::size_t>(rank)]; }
  Tag shifted(Tag tag);
  std::unique_ptr<Transfer> watched(std::unique_ptr<Transfer> transfer, int peer) const;

  const std::shared_ptr<Membership> membership_;
  const View view_;
  const int rank_;
  std::vector<int> node_of_;
  std::unique_ptr<NodeMemory> memory_;
  bool told_ = false;  // poll() has thrown that the epoch is over
};

}  // namespace sordino::membership
