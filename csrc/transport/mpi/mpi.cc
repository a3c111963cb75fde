// Ranks as MPI processes. Within a node, control messages go through mailboxes in shared memory and memory is
// shared; everything else is MPI_Isend, MPI_Irecv and MPI_Test, request by request: with a dead peer a Waitall may
// abort the whole process. No MPI window and no MPI collective runs after construction, so none can be left half done.
#include <dlfcn.h>
#include <mpi.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <random>

#include "transport/mpi/control.h"
#include "transport/mpi/plugin.h"
#include "transport/mpi/session.h"
#include "transport/shm/shm.h"

namespace sordino::mpi {
namespace {

template <class T>
std::vector<T> allgather(MPI_Comm comm, const T& mine) {
  int size = 0;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  std::vector<T> all(static_cast<std::size_t>(size));
  check(MPI_Allgather(&mine, sizeof(T), MPI_BYTE, all.data(), sizeof(T), MPI_BYTE, comm), "MPI_Allgather");
  return all;
}

// The fingerprints of all ranks. This comes first, and in a form that all versions share (a length, then text): ranks
// of different versions, or set up differently, would misread each other in whatever follows.
std::vector<std::string> gather_fingerprints(MPI_Comm comm, std::string mine) {
  constexpr int kLongest = 1 << 16;
  const std::vector<int> lengths = allgather(comm, static_cast<int>(mine.size()));
  const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
  if (*least < 0 || *most > kLongest) {
    throw TransportError("ranks do not understand each other: one speaks of " +
                         std::to_string(*least < 0 ? *least : *most) + " bytes where at most " +
                         std::to_string(kLongest) + " can be; is the same Sordino installed on all nodes?");
  }
  const auto room = static_cast<std::size_t>(*most);
  mine.resize(room);
  std::string all(room * lengths.size(), '\0');
  check(MPI_Allgather(mine.data(), *most, MPI_BYTE, all.data(), *most, MPI_BYTE, comm), "MPI_Allgather");
  std::vector<std::string> fingerprints;
  for (const int length : lengths)
    fingerprints.push_back(all.substr(fingerprints.size() * room, static_cast<std::size_t>(length)));
  return fingerprints;
}

MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  check(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

MPI_Comm choose(const Members& members) {
  if (members.fortran_handle) {
    MPI_Comm given = MPI_Comm_f2c(*members.fortran_handle);
    if (given == MPI_COMM_NULL) throw UsageError("init(comm=...) was given MPI_COMM_NULL");
    return duplicate(given);
  }
  if (members.ranks.empty()) return duplicate(MPI_COMM_WORLD);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (const int member : members.ranks) {
    if (member < 0 || member >= size) {
      throw UsageError("init(comm=[...]) names rank " + std::to_string(member) + " of a world of " +
                       std::to_string(size));
    }
  }
  if (std::find(members.ranks.begin(), members.ranks.end(), rank) == members.ranks.end()) {
    throw UsageError("rank " + std::to_string(rank) + " is not among the ranks given to init(comm=[...])");
  }
  MPI_Group world, group;
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world, static_cast<int>(members.ranks.size()), members.ranks.data(), &group), "MPI_Group_incl");
  MPI_Comm comm = MPI_COMM_NULL;
  check(MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &comm), "MPI_Comm_create_group");
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return comm;
}

// Requests are never freed by force: with a failed peer that may abort the process, so an unfinished one leaks.
class MpiTransfer : public Transfer {
 public:
  MpiTransfer(int peer, std::vector<MPI_Request> requests, std::atomic<int>& under_way)
      : peer_(peer), requests_(std::move(requests)), under_way_(under_way) {
    ++under_way_;
  }
  ~MpiTransfer() override { --under_way_; }
  bool test() override {
    while (!requests_.empty()) {
      int done = 0;
      check_peer(MPI_Test(&requests_.back(), &done, MPI_STATUS_IGNORE), "MPI_Test", peer_);
      if (!done) return false;
      requests_.pop_back();
    }
    return true;
  }

 private:
  int peer_;
  std::vector<MPI_Request> requests_;
  std::atomic<int>& under_way_;
};

// A number for this machine (since it was started) and process namespace.
std::size_t where_pids_mean_the_same() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat names{};
  if (stat("/proc/self/ns/pid", &names) != 0)
    names.st_ino = static_cast<ino_t>(getpid());  // then for this process alone
  return std::hash<std::string>{}(boot + "/" + std::to_string(names.st_ino));
}

// Open MPI, and those made of it, tell whether they take CUDA memory; the others are believed not to.
bool knows_cuda() {
  using Query = int (*)();
  const auto query = reinterpret_cast<Query>(dlsym(RTLD_DEFAULT, "MPIX_Query_cuda_support"));
  return query != nullptr && query() == 1;
}

class MpiTransport : public Transport {
 public:
  MpiTransport(const Members& members, const Config& config) : data_(choose(members)), control_(duplicate(data_)) {
    MPI_Comm_rank(data_, &rank_);
    MPI_Comm_size(data_, &size_);
    if (members.compare) members.compare(gather_fingerprints(data_, members.fingerprint));
    const LauncherHint hint = launcher_hint();
    if (size_ == 1 && hint.size > 1 && !members.fortran_handle && members.ranks.empty()) {
      throw TransportError(hint.variable + " says that a launcher started " + std::to_string(hint.size) +
                           " processes, but MPI sees one: the launcher belongs to another MPI than the one Sordino was "
                           "built with (" +
                           library_version() + "). Start with `sordino run`, or with that MPI's mpirun.");
    }
    require_tags();
    find_nodes(config.ranks_per_node);
    find_hosts();
    share_memory(config.shared_memory);
    takes_device_memory_ = config.cuda_aware < 0 ? knows_cuda() : config.cuda_aware == 1;
    int world_size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    if (size_ == world_size) all_have_attached();
  }

  ~MpiTransport() override {
    for (const auto& [rank, pidfd] : pidfds_) close(pidfd);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::vector<int>& node_of() const override { return node_of_; }
  std::string host_of(int rank) const override { return hosts_[static_cast<std::size_t>(rank)]; }
  std::string name() const override { return boxes_ ? "mpi + shared memory" : "mpi"; }

  void post(int to, Bytes message) override {
    const int index = boxes_ ? index_here(to) : -1;
    if (index >= 0) return boxes_->post(index, std::move(message));
    control_.post(to, std::move(message));
  }

  bool poll(const Sink& sink) override {
    bool moved = boxes_ && boxes_->poll(sink);
    if (static_cast<int>(here_.size()) == size_ && boxes_) return moved;
    return control_.poll(sink) || moved;
  }

  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override {
    std::vector<MPI_Request> requests;
    for (std::size_t at = 0; at == 0 || at < data.size(); at += kLargestPart) {
      const auto part = static_cast<int>(std::min(kLargestPart, data.size() - at));
      check_peer(
          MPI_Isend(data.data() + at, part, MPI_BYTE, to, static_cast<int>(tag), data_, &requests.emplace_back()),
          "MPI_Isend", to);
    }
    return std::make_unique<MpiTransfer>(to, std::move(requests), transfers_);
  }

  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) override {
    std::vector<MPI_Request> requests;
    for (std::size_t at = 0; at == 0 || at < data.size(); at += kLargestPart) {
      const auto part = static_cast<int>(std::min(kLargestPart, data.size() - at));
      check_peer(
          MPI_Irecv(data.data() + at, part, MPI_BYTE, from, static_cast<int>(tag), data_, &requests.emplace_back()),
          "MPI_Irecv", from);
    }
    return std::make_unique<MpiTransfer>(from, std::move(requests), transfers_);
  }

  bool idle() const override { return control_.idle() && (!boxes_ || boxes_->idle()); }
  NodeMemory& node_memory() override { return memory_; }
  bool shares_memory() const override { return boxes_ != nullptr; }
  bool takes_device_memory() const override { return takes_device_memory_; }

  std::uint32_t ticket() override { return own_bell().ticket(); }
  void sleep(std::uint32_t ticket, std::chrono::microseconds limit) override { own_bell().sleep(ticket, limit); }
  void ring(int rank) override {
    if (rank == rank_) {
      own_bell().ring();
    } else if (boxes_) {
      boxes_->bell(index_here(rank)).ring();
    }
  }
  // MPI_Finalize waits for all ranks, so what lives until the process ends outlives every wish to map it.
  void keep(std::shared_ptr<Segment> segment) override {
    static std::vector<std::shared_ptr<Segment>> kept;
    kept.push_back(std::move(segment));
  }
  bool rings_always() const override { return boxes_ && static_cast<int>(here_.size()) == size_ && transfers_ == 0; }

  std::vector<Loss> take_losses() override {
    std::vector<Loss> losses;
    for (auto entry = pidfds_.begin(); entry != pidfds_.end();) {
      pollfd watched{entry->second, POLLIN, 0};
      if (::poll(&watched, 1, 0) == 1) {
        losses.push_back({entry->first, "its process has ended"});
        close(entry->second);
        entry = pidfds_.erase(entry);
      } else {
        ++entry;
      }
    }
    for (Loss& loss : control_.take_losses()) losses.push_back(std::move(loss));
    return losses;
  }

  void outlive_peers() override { control_.outlive_peers(); }
  void abandon() override { never_finalize(); }

 private:
  // MPI promises tags up to 32767 only; every implementation we know has at least 2^27.
  void require_tags() {
    int* largest = nullptr;
    int found = 0;
    check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &found), "MPI_Comm_get_attr");
    if (!found || *largest < (1 << kTagBits) - 1) {
      throw TransportError("this MPI has tags up to " + std::to_string(found ? *largest : 32767) + " only; " +
                           std::to_string((1 << kTagBits) - 1) + " are needed");
    }
  }

  void find_nodes(int ranks_per_node) {
    MPI_Comm node = MPI_COMM_NULL;
    check(MPI_Comm_split_type(data_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
    int leader = rank_;
    check(MPI_Bcast(&leader, 1, MPI_INT, 0, node), "MPI_Bcast");
    int index = 0;
    MPI_Comm_rank(node, &index);
    MPI_Comm_free(&node);
    // A rank is known by (machine's leader, part of the machine); nodes are numbered in order of their first rank.
    struct Home {
      int leader, part;
      bool operator==(const Home&) const = default;
    };
    const std::vector<Home> homes = allgather(data_, Home{leader, ranks_per_node > 0 ? index / ranks_per_node : 0});
    std::vector<Home> seen;
    for (const Home& home : homes) {
      auto found = std::find(seen.begin(), seen.end(), home);
      node_of_.push_back(static_cast<int>(found - seen.begin()));
      if (found == seen.end()) seen.push_back(home);
    }
    for (int other = 0; other < size_; ++other) {
      if (node_of_[other] == node_of_[rank_]) here_.push_back(other);
    }
  }

  void find_hosts() {
    struct Name {
      char text[MPI_MAX_PROCESSOR_NAME];
    };
    Name mine{};
    int length = 0;
    check(MPI_Get_processor_name(mine.text, &length), "MPI_Get_processor_name");
    for (const Name& name : allgather(data_, mine)) hosts_.emplace_back(name.text);
  }

  int index_here(int rank) const {
    auto found = std::lower_bound(here_.begin(), here_.end(), rank);
    return found != here_.end() && *found == rank ? static_cast<int>(found - here_.begin()) : -1;
  }

  Doorbell& own_bell() { return boxes_ ? boxes_->bell(index_here(rank_)) : private_bell_; }

  // Every rank publishes a box with a random mark and looks for its peers' marks. Ranks that cannot see each other
  // (another pid namespace, hidden /proc) fall back to MPI together, with a warning.
  void share_memory(bool wanted) {
    struct Introduction {
      pid_t pid;
      std::uint32_t mark;
      std::size_t machine;
      Location box;
    };
    Introduction mine{getpid(), std::random_device{}() | 1u, where_pids_mean_the_same(), {}};
    std::string trouble;
    if (wanted) {
      try {
        box_ = memory_.allocate(shm::Mailboxes::bytes_for(here_.size()));
        mine.box = memory_.locate(box_->data, box_->bytes);
        reinterpret_cast<Doorbell*>(box_->data)->rings = mine.mark;
      } catch (const Error& error) {
        trouble = error.what();
      }
    }
    const std::vector<Introduction> told = allgather(data_, mine);
    std::vector<std::byte*> boxes;
    for (const int peer : here_) {
      memory_.introduce(peer, told[peer].pid);
      if (!wanted || !trouble.empty()) continue;
      try {
        if (told[peer].box.segment == 0) throw TransportError("rank " + std::to_string(peer) + " has no shared memory");
        std::byte* box = peer == rank_ ? box_->data : memory_.map(peer, told[peer].box);
        if (reinterpret_cast<Doorbell*>(box)->rings != told[peer].mark) {
          throw TransportError("rank " + std::to_string(peer) + " lives in another process namespace");
        }
        boxes.push_back(box);
      } catch (const Error& error) {
        trouble = error.what();
      }
    }
    const std::vector<int> fine = allgather(data_, wanted && trouble.empty() ? 1 : 0);
    const bool all_here = std::all_of(here_.begin(), here_.end(), [&](int peer) { return fine[peer] == 1; });
    if (all_here) {
      boxes_ = std::make_unique<shm::Mailboxes>(here_, index_here(rank_), std::move(boxes));
    } else if (wanted && !trouble.empty()) {
      std::cerr << "sordino: rank " << rank_ << " does not share memory with its node: " << trouble
                << ". Everything goes over MPI, which is slower.\n";
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_ || told[peer].machine != mine.machine) continue;
      const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, told[peer].pid, 0));
      if (pidfd >= 0) pidfds_.emplace_back(peer, pidfd);
    }
  }

  bool takes_device_memory_ = false;
  MPI_Comm data_;  // freed by MPI_Finalize: freeing it here would have to wait for all ranks
  Control control_;
  int rank_ = 0, size_ = 1;
  std::vector<int> node_of_, here_;
  std::vector<std::string> hosts_;
  shm::ShmMemory memory_;
  std::shared_ptr<Segment> box_;
  std::unique_ptr<shm::Mailboxes> boxes_;
  Doorbell private_bell_;
  std::atomic<int> transfers_{0};  // MPI transfers that exist; their end rings no bell
  std::vector<std::pair<int, int>> pidfds_;
};

}  // namespace
}  // namespace sordino::mpi

extern "C" {

__attribute__((visibility("default"))) sordino::Transport* sordino_mpi_open(const sordino::mpi::Members* members,
                                                                            const sordino::Config* config) {
  sordino::mpi::ensure_initialized();
  return new sordino::mpi::MpiTransport(*members, *config);
}

__attribute__((visibility("default"))) const char* sordino_mpi_describe() {
  static const std::string version = sordino::mpi::library_version();
  return version.c_str();
}

__attribute__((visibility("default"))) bool sordino_mpi_takes_cuda() { return sordino::mpi::knows_cuda(); }

__attribute__((visibility("default"))) bool sordino_mpi_initialized() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  return initialized != 0;
}
}
