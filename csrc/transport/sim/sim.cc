#include "transport/sim/sim.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>

#include "transport/doorbell.h"
#include "transport/segment_table.h"

namespace sordino::sim {
namespace {

struct Mail {
  int from;
  Bytes message;
};

// One bulk send waiting for its receiver. Whoever abandons it first takes it out of the mailbox.
struct Parcel {
  int from;
  Tag tag;
  std::span<const std::byte> data;
  std::atomic<bool> taken{false};
};

struct Mailbox {
  std::mutex mutex;
  std::deque<Mail> mail;
  std::list<std::shared_ptr<Parcel>> parcels;
  std::vector<Loss> losses;
  Doorbell bell;
};

struct World {
  explicit World(const std::vector<int>& node_of) : boxes(node_of.size()), nodes(node_of) {}
  std::vector<Mailbox> boxes;
  std::vector<int> nodes;
  std::mutex kept_mutex;
  std::vector<std::shared_ptr<Segment>> kept;
};

class HeapSegment : public Segment {
 public:
  HeapSegment(std::shared_ptr<SegmentTable> table, std::size_t size) : table_(std::move(table)) {
    constexpr std::size_t kPage = 4096;
    const std::size_t rounded = (size + kPage - 1) / kPage * kPage;
    data = static_cast<std::byte*>(std::aligned_alloc(kPage, rounded));
    if (data == nullptr) throw TransportError("no memory for a segment of " + std::to_string(size) + " bytes");
    std::memset(data, 0, rounded);
    bytes = size;
    Location location;
    location.key = reinterpret_cast<std::uint64_t>(data);
    table_->add(data, size, location);
  }
  ~HeapSegment() override {
    table_->remove(data);
    std::free(data);
  }

 private:
  std::shared_ptr<SegmentTable> table_;
};

class HeapMemory : public NodeMemory {
 public:
  std::shared_ptr<Segment> allocate(std::size_t bytes) override {
    return std::make_shared<HeapSegment>(table_, std::max<std::size_t>(bytes, 1));
  }

 protected:
  std::byte* map_host(int, const Location& location) override {
    return reinterpret_cast<std::byte*>(location.key) + location.offset;
  }
  void unmap_host(int, std::uint64_t) override {}
};

class Sending : public Transfer {
 public:
  Sending(Mailbox& box, std::shared_ptr<Parcel> parcel) : box_(box), parcel_(std::move(parcel)) {}
  ~Sending() override {
    std::lock_guard lock(box_.mutex);
    box_.parcels.remove(parcel_);
  }
  bool test() override { return parcel_->taken.load(std::memory_order_acquire); }

 private:
  Mailbox& box_;
  std::shared_ptr<Parcel> parcel_;
};

class Receiving : public Transfer {
 public:
  Receiving(World& world, int self, int from, Tag tag, std::span<std::byte> data)
      : world_(world), self_(self), from_(from), tag_(tag), data_(data) {}

  bool test() override {
    if (done_) return true;
    Mailbox& box = world_.boxes[self_];
    std::lock_guard lock(box.mutex);
    for (auto parcel = box.parcels.begin(); parcel != box.parcels.end(); ++parcel) {
      if ((*parcel)->from != from_ || (*parcel)->tag != tag_) continue;
      if ((*parcel)->data.size() != data_.size()) {
        throw TransportError("rank " + std::to_string(from_) + " sent " + std::to_string((*parcel)->data.size()) +
                             " bytes where " + std::to_string(data_.size()) + " were expected");
      }
      if (!data_.empty()) std::memcpy(data_.data(), (*parcel)->data.data(), data_.size());
      (*parcel)->taken.store(true, std::memory_order_release);
      box.parcels.erase(parcel);
      world_.boxes[from_].bell.ring();
      return done_ = true;
    }
    return false;
  }

 private:
  World& world_;
  int self_, from_;
  Tag tag_;
  std::span<std::byte> data_;
  bool done_ = false;
};

class SimTransport : public Transport {
 public:
  SimTransport(std::shared_ptr<World> world, int rank) : world_(std::move(world)), rank_(rank) {}
  ~SimTransport() override {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank_) continue;
      Mailbox& box = world_->boxes[peer];
      std::lock_guard lock(box.mutex);
      box.losses.push_back({rank_, "its thread has ended"});
      box.bell.ring();
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_->boxes.size()); }
  const std::vector<int>& node_of() const override { return world_->nodes; }
  std::string host_of(int rank) const override { return "sim-node-" + std::to_string(world_->nodes[rank]); }
  std::string name() const override { return "sim"; }

  void post(int to, Bytes message) override {
    Mailbox& box = world_->boxes[to];
    {
      std::lock_guard lock(box.mutex);
      box.mail.push_back({rank_, std::move(message)});
    }
    box.bell.ring();
  }
  bool poll(const Sink& sink) override {
    Mailbox& box = world_->boxes[rank_];
    std::deque<Mail> arrived;
    {
      std::lock_guard lock(box.mutex);
      arrived.swap(box.mail);
    }
    for (Mail& mail : arrived) sink(mail.from, mail.message);
    return !arrived.empty();
  }
  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override {
    Mailbox& box = world_->boxes[to];
    auto parcel = std::make_shared<Parcel>();
    parcel->from = rank_;
    parcel->tag = tag;
    parcel->data = data;
    {
      std::lock_guard lock(box.mutex);
      box.parcels.push_back(parcel);
    }
    box.bell.ring();
    return std::make_unique<Sending>(box, parcel);
  }
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) override {
    return std::make_unique<Receiving>(*world_, rank_, from, tag, data);
  }
  bool idle() const override { return true; }

  NodeMemory& node_memory() override { return memory_; }
  bool shares_memory() const override { return true; }
  bool takes_device_memory() const override { return true; }  // which is host memory here

  std::uint32_t ticket() override { return world_->boxes[rank_].bell.ticket(); }
  void sleep(std::uint32_t ticket, std::chrono::microseconds limit) override {
    world_->boxes[rank_].bell.sleep(ticket, limit);
  }
  void ring(int rank) override { world_->boxes[rank].bell.ring(); }
  void keep(std::shared_ptr<Segment> segment) override {
    std::lock_guard lock(world_->kept_mutex);
    world_->kept.push_back(std::move(segment));
  }
  bool rings_always() const override { return true; }

  std::vector<Loss> take_losses() override {
    Mailbox& box = world_->boxes[rank_];
    std::lock_guard lock(box.mutex);
    return std::exchange(box.losses, {});
  }
  void outlive_peers() override {}
  void abandon() override {}

 private:
  std::shared_ptr<World> world_;
  int rank_;
  HeapMemory memory_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_world(const std::vector<int>& node_of) {
  if (node_of.empty()) throw UsageError("a world needs at least one rank, not 0");
  auto world = std::make_shared<World>(node_of);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < static_cast<int>(node_of.size()); ++rank)
    transports.push_back(std::make_unique<SimTransport>(world, rank));
  return transports;
}

}  // namespace sordino::sim
