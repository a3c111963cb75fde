// Transports around another one: for tests that change some of its functions.
#pragma once

#include <memory>
#include <utility>

#include "base/error.h"
#include "transport/transport.h"

namespace sordino::test {

class Wrapped : public Transport {
 public:
  explicit Wrapped(std::unique_ptr<Transport> below) : below_(std::move(below)) {}

  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override {
    return below_->send(to, tag, data);
  }
  int rank() const override { return below_->rank(); }
  int size() const override { return below_->size(); }
  const std::vector<int>& node_of() const override { return below_->node_of(); }
  double ranks_per_core() const override { return below_->ranks_per_core(); }
  std::string host_of(int rank) const override { return below_->host_of(rank); }
  int process_of(int rank) const override { return below_->process_of(rank); }
  std::string name() const override { return below_->name(); }
  void post(int to, Bytes message) override { below_->post(to, std::move(message)); }
  bool poll(const Sink& sink) override { return below_->poll(sink); }
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) override {
    return below_->receive(from, tag, data);
  }
  bool idle() const override { return below_->idle(); }
  NodeMemory& node_memory() override { return below_->node_memory(); }
  bool node_shares_memory(int rank) const override { return below_->node_shares_memory(rank); }
  bool takes_device_memory() const override { return below_->takes_device_memory(); }
  std::uint32_t ticket() override { return below_->ticket(); }
  void sleep(std::uint32_t ticket, std::chrono::microseconds limit) override { below_->sleep(ticket, limit); }
  void ring(int rank) override { below_->ring(rank); }
  void keep(std::shared_ptr<Segment> segment) override { below_->keep(std::move(segment)); }
  bool rings_always() const override { return below_->rings_always(); }
  std::vector<Loss> take_losses() override { return below_->take_losses(); }
  void tolerate_losses() override { below_->tolerate_losses(); }
  void abandon() override { below_->abandon(); }

 private:
  const std::unique_ptr<Transport> below_;
};

// A transport that cannot send bulk data, as if all connections were broken.
class Unreachable : public Wrapped {
 public:
  using Wrapped::Wrapped;
  std::unique_ptr<Transfer> send(int to, Tag, std::span<const std::byte>) override {
    throw PeerLost("rank " + std::to_string(to) + " cannot be reached", {to});
  }
};

// A transport that has no memory for any transfer.
class WithoutRoom : public Wrapped {
 public:
  using Wrapped::Wrapped;
  std::unique_ptr<Transfer> send(int, Tag, std::span<const std::byte>) override { throw TransportError("no room"); }
};

}  // namespace sordino::test
