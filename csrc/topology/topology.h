// Who mixes with whom: pure functions of (round, segment, rank) that every rank computes alike, so nobody has to be
// told. Ranks count from 0 within the workers that train together.
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

// What a worker's segment becomes: scale * (its own value, if `keeps_own`, + the sources' values).
struct Row {
  std::vector<int> sources;  // other ranks, each at most once
  bool keeps_own = true;
  double scale = 1;

  // The worker's value stays as it is.
  void leave_alone() {
    sources.clear();
    keeps_own = true;
    scale = 1;
  }
  // The mean of the worker's own value and the sources'.
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
  // The ranks in whose rows `rank` is a source.
  virtual void destinations(At at, int rank, std::vector<int>& ranks) const = 0;

 private:
  const int size_;
};

// Crossover-SGD, section 3.2: each segment goes round the workers along a random cycle, drawn anew for every round and
// segment. All pairs are equally likely. Constant time and memory.
class RandomCycle : public Topology {
 public:
  RandomCycle(int size, std::uint64_t seed) : Topology(size), seed_(seed) {}
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  const std::uint64_t seed_;
};

// D-PSGD (Lian et al. 2017): the mean with both neighbours on a ring, whatever the round.
class Ring : public Topology {
 public:
  using Topology::Topology;
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;
};

// SGP (Assran et al. 2019): the directed exponential graph. In round t a worker sends to the `peers` ranks that are
// 2^(t * peers), 2^(t * peers + 1), ... further on (exponents modulo ceil(log2 size)).
class Exponential : public Topology {
 public:
  // How many peers there are, from which round on. UsageError unless that begins with round 0, and
  // 1 <= peers <= ceil(log2 size) (any for size < 3).
  Exponential(int size, std::map<std::uint64_t, int> peers);
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  // How far on the peers of a round are.
  void offsets(At at, std::vector<int>& far) const;
  const int exponents_;
  const std::map<std::uint64_t, int> peers_;
};

// GossipGraD (Daily et al. 2018, section 4.3): dissemination, under a rank permutation that is drawn anew whenever all
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
// others, so that over the segments it asks every other one when segments * replicas >= size - 1. Nobody balances who
// is asked: destinations() takes O(size), and there may be none or many.
class RandomPull : public Topology {
 public:
  // UsageError unless 1 <= replicas <= size - 1 (any for size 1) and segments >= 1.
  RandomPull(int size, std::uint64_t seed, int segments, int replicas);
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  const std::uint64_t seed_;
  const int segments_, replicas_;
};

// Hierarchical gossip (Crossover-SGD, section 3.3): `among` joins groups of `group_size` neighbouring ranks, whose
// members hold equal values. What a group receives comes from the other group's first rank, its leader, and goes to
// all its members or, with `leaders_only`, to its leader.
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

// Every member of a group of `group_size` neighbouring ranks takes over its leader's value: a broadcast.
class Star : public Topology {
 public:
  // UsageError unless group_size divides size.
  Star(int size, int group_size);
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

 private:
  const int group_size_;
};

// Where the first `workers` ranks have values of their own, and the others only serve them.
class Served : public Topology {
 public:
  // UsageError unless 1 <= workers <= size.
  Served(int size, int workers);
  int workers() const { return workers_; }

 private:
  const int workers_;
};

// The value of every worker becomes the mean of theirs.
class Mean : public Served {
 public:
  using Served::Served;
  bool is_mean_of_all() const override { return workers() == size(); }
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;
};

// The two halves of a sharded average (hierarchical local SGD, section 3.2), and of a parameter server's: rank s modulo
// size owns segment s. Its value becomes the mean of the workers'...
class ToOwner : public Served {
 public:
  using Served::Served;
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;
};

// ... and the (other) workers take it over.
class FromOwner : public Served {
 public:
  using Served::Served;
  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;
};

}  // namespace sordino::topology
