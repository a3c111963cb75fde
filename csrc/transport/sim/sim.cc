#include "transport/sim/sim.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <list>
#include <mutex>
#include <thread>

#include "base/cores.h"
#include "transport/doorbell.h"
#include "transport/segment_table.h"

namespace sordino::sim {
namespace {

using std::chrono::milliseconds;

struct Mail {
  int from;
  Bytes message;
};

// A bulk send that waits for its receiver. A sender that abandons it first removes it from the mailbox.
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
  std::atomic<std::uint64_t> sent{0}, sent_bytes{0};  // by this rank

  void count(std::size_t bytes) {
    sent.fetch_add(1, std::memory_order_relaxed);
    sent_bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
};

struct Free {
  void operator()(std::byte* data) const { std::free(data); }
};
using Pages = std::unique_ptr<std::byte, Free>;

// After a kill, keeps freed shared memory of all ranks until the last transport is gone: peers may still read it.
class Remains {
 public:
  void begin() { begun_ = true; }
  void take(Pages pages) {
    if (!begun_) return;
    std::lock_guard lock(mutex_);
    kept_.push_back(std::move(pages));
  }

 private:
  std::atomic<bool> begun_ = false;
  std::mutex mutex_;
  std::vector<Pages> kept_;
};

}  // namespace

struct Machines {
  explicit Machines(const std::vector<int>& node_of)
      : boxes(node_of.size()),
        nodes(node_of),
        killed(node_of.size()),
        stopped(node_of.size()),
        links(node_of.size() * node_of.size()) {}
  std::vector<Mailbox> boxes;
  std::vector<int> nodes;
  std::mutex kept_mutex;
  std::vector<std::shared_ptr<Segment>> kept;
  std::vector<std::atomic<bool>> killed, stopped;
  std::vector<std::atomic<bool>> links;  // true: cut
  const int cores = Cores::of_this_process().count();
  std::shared_ptr<Remains> remains = std::make_shared<Remains>();
  std::function<bool()> late;
  std::function<void(int)> mapping;

  std::atomic<bool>& link(int one, int other) {
    return links[static_cast<std::size_t>(one) * nodes.size() + static_cast<std::size_t>(other)];
  }
  // Tells all other ranks that a rank is gone.
  void mourn(int rank, const std::string& cause) {
    for (std::size_t peer = 0; peer < boxes.size(); ++peer) {
      if (static_cast<int>(peer) == rank) continue;
      std::lock_guard lock(boxes[peer].mutex);
      boxes[peer].losses.push_back({rank, cause});
      boxes[peer].bell.ring();
    }
  }
};

namespace {

// A rank that touches unreserved memory of a sparse segment crashes, because a real segment may have no memory there.
class HeapSegment : public Segment {
 public:
  HeapSegment(std::weak_ptr<Remains> remains, std::shared_ptr<SegmentTable> table, std::size_t size,
              std::size_t reserved)
      : remains_(std::move(remains)), table_(std::move(table)), end_(rounded(size)), reserved_(rounded(reserved)) {
    pages_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, end_)));
    data = pages_.get();
    if (data == nullptr) throw TransportError("no memory for a segment of " + std::to_string(size) + " bytes");
    std::memset(data, 0, end_);
    bytes = size;
    protect(PROT_NONE);
    Location location;
    location.key = reinterpret_cast<std::uint64_t>(data);
    table_->add(data, size, location);
  }
  ~HeapSegment() override {
    table_->remove(data);
    protect(PROT_READ | PROT_WRITE);  // it goes back to the heap
    if (const auto remains = remains_.lock()) remains->take(std::move(pages_));
  }
  void reserve(std::size_t end) override {
    if (end <= reserved_) return;
    const std::size_t now = std::min(rounded(end), end_);
    mprotect(data + reserved_, now - reserved_, PROT_READ | PROT_WRITE);
    reserved_ = now;
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static std::size_t rounded(std::size_t size) { return (size + kPage - 1) / kPage * kPage; }
  // Sets the access to the memory that is not reserved.
  void protect(int access) {
    if (reserved_ < end_) mprotect(data + reserved_, end_ - reserved_, access);
  }

  Pages pages_;
  std::weak_ptr<Remains> remains_;  // weak, so that a segment that is never freed does not keep the others
  std::shared_ptr<SegmentTable> table_;
  const std::size_t end_;
  std::size_t reserved_;  // bytes at the beginning
};

class HeapMemory : public NodeMemory {
 public:
  explicit HeapMemory(const Machines& machines) : remains_(machines.remains), mapping_(machines.mapping) {}
  std::shared_ptr<Segment> allocate(std::size_t bytes) override {
    const std::size_t size = std::max<std::size_t>(bytes, 1);
    return std::make_shared<HeapSegment>(remains_, table_, size, size);
  }
  std::shared_ptr<Segment> allocate_sparse(std::size_t bytes, std::size_t reserved) override {
    return std::make_shared<HeapSegment>(remains_, table_, bytes, std::min(reserved, bytes));
  }

 protected:
  std::byte* map_host(int rank, const Location& location) override {
    if (mapping_) mapping_(rank);
    return reinterpret_cast<std::byte*>(location.key) + location.offset;
  }
  void unmap_host(int, std::uint64_t) override {}

 private:
  std::shared_ptr<Remains> remains_;
  const std::function<void(int)>& mapping_;
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
  Receiving(Machines& machines, int self, int from, Tag tag, std::span<std::byte> data)
      : machines_(machines), self_(self), from_(from), tag_(tag), data_(data) {}

  bool test() override {
    if (done_) return true;
    if (machines_.link(from_, self_) || machines_.killed[self_]) return false;
    if (machines_.late && machines_.late()) return false;
    Mailbox& box = machines_.boxes[self_];
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
      machines_.boxes[from_].bell.ring();
      return done_ = true;
    }
    return false;
  }

 private:
  Machines& machines_;
  int self_, from_;
  Tag tag_;
  std::span<std::byte> data_;
  bool done_ = false;
};

class SimTransport : public Transport {
 public:
  SimTransport(std::shared_ptr<Machines> machines, int rank)
      : machines_(std::move(machines)), rank_(rank), memory_(*machines_) {}
  ~SimTransport() override {
    if (!machines_->killed[rank_]) machines_->mourn(rank_, "its thread has ended");
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(machines_->boxes.size()); }
  const std::vector<int>& node_of() const override { return machines_->nodes; }
  double ranks_per_core() const override { return static_cast<double>(size()) / machines_->cores; }
  int process_of(int) const override { return getpid(); }
  std::string host_of(int rank) const override { return "sim-node-" + std::to_string(machines_->nodes[rank]); }
  std::string name() const override { return "sim"; }

  void post(int to, Bytes message) override {
    if (machines_->killed[rank_]) return;
    machines_->boxes[rank_].count(message.size());
    Mailbox& box = machines_->boxes[to];
    {
      std::lock_guard lock(box.mutex);
      box.mail.push_back({rank_, std::move(message)});
    }
    box.bell.ring();
  }
  bool poll(const Sink& sink) override {
    while (machines_->stopped[rank_] && !machines_->killed[rank_]) std::this_thread::sleep_for(milliseconds(1));
    if (machines_->killed[rank_]) {
      if (!std::exchange(mourned_, true)) machines_->mourn(rank_, "it was killed");
      throw Evicted("this rank was killed");
    }
    Mailbox& box = machines_->boxes[rank_];
    std::deque<Mail> arrived;
    {
      std::lock_guard lock(box.mutex);
      arrived.swap(box.mail);
      for (Mail& mail : std::exchange(arrived, {})) {
        (machines_->link(mail.from, rank_) ? box.mail : arrived).push_back(std::move(mail));
      }
    }
    const bool moved = !arrived.empty();
    try {
      while (!arrived.empty()) {
        const Mail mail = std::move(arrived.front());
        arrived.pop_front();
        sink(mail.from, mail.message);
      }
    } catch (...) {  // the remaining messages are delivered by the next call
      std::lock_guard lock(box.mutex);
      box.mail.insert(box.mail.begin(), std::move_iterator(arrived.begin()), std::move_iterator(arrived.end()));
      throw;
    }
    return moved;
  }
  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override {
    machines_->boxes[rank_].count(data.size());
    Mailbox& box = machines_->boxes[to];
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
    return std::make_unique<Receiving>(*machines_, rank_, from, tag, data);
  }
  bool idle() const override { return true; }

  NodeMemory& node_memory() override { return memory_; }
  bool node_shares_memory(int) const override { return true; }
  bool takes_device_memory() const override { return true; }  // it is host memory here

  std::uint32_t ticket() override { return machines_->boxes[rank_].bell.ticket(); }
  void sleep(std::uint32_t ticket, std::chrono::microseconds limit) override {
    machines_->boxes[rank_].bell.sleep(ticket, limit);
  }
  void ring(int rank) override { machines_->boxes[rank].bell.ring(); }
  void keep(std::shared_ptr<Segment> segment) override {
    std::lock_guard lock(machines_->kept_mutex);
    machines_->kept.push_back(std::move(segment));
  }
  bool rings_always() const override { return true; }

  std::vector<Loss> take_losses() override {
    Mailbox& box = machines_->boxes[rank_];
    std::lock_guard lock(box.mutex);
    return std::exchange(box.losses, {});
  }
  void tolerate_losses() override {}
  void abandon() override {}

 private:
  std::shared_ptr<Machines> machines_;
  int rank_;
  HeapMemory memory_;
  bool mourned_ = false;
};

}  // namespace

Network::Network(const std::vector<int>& node_of) {
  if (node_of.empty()) throw UsageError("a world needs at least one rank, not 0");
  machines_ = std::make_shared<Machines>(node_of);
}

std::vector<std::unique_ptr<Transport>> Network::transports() const {
  std::vector<std::unique_ptr<Transport>> made;
  for (int rank = 0; rank < static_cast<int>(machines_->nodes.size()); ++rank) {
    made.push_back(std::make_unique<SimTransport>(machines_, rank));
  }
  return made;
}

void Network::kill(int rank) {
  machines_->remains->begin();
  machines_->killed.at(static_cast<std::size_t>(rank)) = true;
  machines_->boxes[static_cast<std::size_t>(rank)].bell.ring();
}

void Network::stop(int rank, bool stopped) { machines_->stopped.at(static_cast<std::size_t>(rank)) = stopped; }

void Network::hinder(std::function<void(int)> mapping) { machines_->mapping = std::move(mapping); }

void Network::delay(std::function<bool()> late) { machines_->late = std::move(late); }

std::vector<Network::Sent> Network::sent() const {
  std::vector<Sent> all;
  for (const Mailbox& box : machines_->boxes) all.push_back({box.sent.load(), box.sent_bytes.load()});
  return all;
}

void Network::cut(int one, int other, bool is_cut) {
  machines_->link(one, other) = is_cut;
  machines_->link(other, one) = is_cut;
}

}  // namespace sordino::sim
