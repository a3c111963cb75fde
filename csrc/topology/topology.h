// Topologies of gossip: pure functions of (round, segment, rank) that say which workers mix. Every rank computes the
// same result, so none is sent. Ranks are numbered from 0 within the workers that train together.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace sordino::topology {

// One exchange of one segment. Rounds count exchanges, not optimizer steps.
struct At {
  std::uint64_t round;
  std::uint32_t segment;
};

// The new value of a worker's segment: scale * (its own value, if `keeps_own`, + the sources' values).
struct Row {
  std::vector<int> sources;  // other ranks, each at most once
  bool keeps_own = true;
  double scale = 1;

  // Leaves the worker's value as it is.
  void leave_alone() {
    sources.clear();
    keeps_own = true;
    scale = 1;
  }
  // Takes the mean of the worker's own value and the sources'.
  void average() {
    keeps_own = true;
    scale = 1.0 / static_cast<double>(sources.size() + 1);
  }
};

class Topology {
 public:
  explicit Topology(int size) : size_(size) {}
  virtual ~Topology() = default;

  int size() const { return size_; }
  virtual void row(At at, int rank, Row& row) const = 0;
  // Whether every rank always takes the mean of all.
  virtual bool is_mean_of_all() const { return false; }
  // Sets `ranks` to the ranks that have `rank` as a source.
  virtual void destinations(At at, int rank, std::vector<int>& ranks) const = 0;

 private:
  const int size_;
};

// Crossover-SGD, section 3.2: each worker gets a segment from its predecessor on a random cycle of all workers, drawn
// anew for every round and segment. All pairs are equally likely. Constant time and memory.
class RandomCycle : public Topology {
 public:
  RandomCycle(int size, std::uint64_t seed) : Topology(size), seed_(seed) {}
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  const std::uint64_t seed_;
};

// D-PSGD (Lian et al. 2017): the mean with both neighbors on a ring, in every round.
class Ring : public Topology {
 public:
  using Topology::Topology;
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;
};

// SGP (Assran et al. 2019): the directed exponential graph. In round t a worker sends to `peers` ranks, at the
// distances 2^(t * peers), 2^(t * peers + 1), ... after it (exponents modulo ceil(log2 size)).
class Exponential : public Topology {
 public:
  // `peers`: number of peers, by the first round in which it holds. Throws UsageError unless the first key is round 0,
  // and 1 <= peers <= ceil(log2 size) (no upper limit for size < 3).
  Exponential(int size, std::map<std::uint64_t, int> peers);
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  // Distances of the peers of a round.
  void offsets(At at, std::vector<int>& far) const;
  const int exponents_;
  const std::map<std::uint64_t, int> peers_;
};

// Dissemination (Daily et al. 2018, section 4.3), under a rank permutation that is drawn anew whenever all
// ceil(log2 size) distances have been used.
class Dissemination : public Topology {
 public:
  Dissemination(int size, std::uint64_t seed);
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  const int exponents_;
  const std::uint64_t seed_;
};

// Segmented gossip, COMBO (Hu et al. 2019): every worker pulls each of `segments` segments from `replicas` random
// workers. In each round it pulls from every other worker if segments * replicas >= size - 1. The number of pulls from
// a worker varies: destinations() takes O(size) time, and may find none or many.
class RandomPull : public Topology {
 public:
  // Throws UsageError unless 1 <= replicas <= size - 1 (no upper limit for size 1) and segments >= 1.
  RandomPull(int size, std::uint64_t seed, int segments, int replicas);
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  const std::uint64_t seed_;
  const int segments_, replicas_;
};

// Groups of workers that average with each other (NoLoCo). They are drawn anew for every round and segment, and all
// divisions into groups of these sizes are equally likely. A group has `peers` workers. If `peers` does not divide the
// number of workers, the others join groups, as evenly as possible: with peers = 2, 5 workers form groups of 3 and 2.
class RandomGroups : public Topology {
 public:
  // Throws UsageError unless 2 <= peers <= size (no upper limit for size 1).
  RandomGroups(int size, std::uint64_t seed, int peers);
  bool is_mean_of_all() const override { return groups_ == 1; }
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  const std::uint64_t seed_;
  const int groups_;
};

// Hierarchical gossip (Crossover-SGD, section 3.3): `among` is the topology of groups of `group_size` neighboring
// ranks, whose members have equal values. The first rank of a group, its leader, sends to all members of another group
// or, with `leaders_only`, to its leader. Throws UsageError unless group_size >= 1.
class Grouped : public Topology {
 public:
  Grouped(std::shared_ptr<const Topology> among, int group_size, bool leaders_only);
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  const std::shared_ptr<const Topology> among_;
  const int group_size_;
  const bool leaders_only_;
};

// Broadcast in groups of `group_size` neighboring ranks: each member takes the value of the first, the leader.
class Star : public Topology {
 public:
  // Throws UsageError unless group_size divides size.
  Star(int size, int group_size);
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  const int group_size_;
};

// Base class of topologies in which the first `workers` ranks have values of their own, and the others only serve them.
class Served : public Topology {
 public:
  // Throws UsageError unless 1 <= workers <= size.
  Served(int size, int workers);
  int workers() const { return workers_; }

 private:
  const int workers_;
};

// Each worker's value becomes the mean of the workers' values.
class Mean : public Served {
 public:
  using Served::Served;
  bool is_mean_of_all() const override { return workers() == size(); }
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;
};

// First half of a sharded average (hierarchical local SGD, section 3.2), or of a parameter server's: rank s modulo size
// owns segment s. The owner's value becomes the mean of the workers' values.
class ToOwner : public Served {
 public:
  using Served::Served;
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;
};

// Second half: the workers, except the owner itself, take the owner's value.
class FromOwner : public Served {
 public:
  using Served::Served;
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;
};

}  // namespace sordino::topology
