#include "topology/topology.h"

#include <algorithm>
#include <bit>
#include <string>

#include "base/error.h"
#include "base/rng.h"
#include "topology/permutation.h"

namespace sordino::topology {
namespace {

// ceil(log2 size): the number of distances 2^0, 2^1, ... below `size`.
int exponents_of(int size) { return static_cast<int>(std::bit_width(static_cast<unsigned>(std::max(size, 1)) - 1)); }

Permutation permutation(int size, std::uint64_t seed, std::uint64_t a, std::uint64_t b) {
  return {static_cast<std::uint32_t>(size), rng::key(rng::key(seed, a), b)};
}

// The rank that is `distance` places after `rank` in the order of `shuffled`, where -size < distance < size.
int along(const Permutation& shuffled, int size, int rank, int distance) {
  const int place = static_cast<int>(shuffled(static_cast<std::uint32_t>(rank))) + distance;
  return static_cast<int>(shuffled.inverse(static_cast<std::uint32_t>(place < 0      ? place + size
                                                                      : place < size ? place
                                                                                     : place - size)));
}

int owner_of(At at, int size) { return static_cast<int>(at.segment % static_cast<std::uint32_t>(size)); }

// The first `size` ranks, without `rank` if it is one of them.
void all_but(int rank, int size, std::vector<int>& ranks) {
  ranks.clear();
  for (int other = 0; other < size; ++other) {
    if (other != rank) ranks.push_back(other);
  }
}

}  // namespace

void RandomCycle::row(At at, int rank, Row& row) const {
  if (size() == 1) return row.leave_alone();
  row.sources.assign(1, along(permutation(size(), seed_, at.round, at.segment), size(), rank, -1));
  row.average();
}

void RandomCycle::destinations(At at, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (size() > 1) ranks.push_back(along(permutation(size(), seed_, at.round, at.segment), size(), rank, 1));
}

void Ring::row(At at, int rank, Row& row) const {
  destinations(at, rank, row.sources);
  row.average();
}

void Ring::destinations(At, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (size() > 1) ranks.push_back((rank + size() - 1) % size());
  if (size() > 2) ranks.push_back((rank + 1) % size());
}

Exponential::Exponential(int size, std::map<std::uint64_t, int> peers)
    : Topology(size), exponents_(exponents_of(size)), peers_(std::move(peers)) {
  if (!peers_.contains(0)) throw UsageError("peers: the schedule must begin at round 0");
  for (const auto& [round, count] : peers_) {
    if (count >= 1 && (size <= 2 || count <= exponents_)) continue;
    throw UsageError("peers=" + std::to_string(count) + ": " + std::to_string(size) +
                     " workers have from 1 to ceil(log2 size) = " + std::to_string(exponents_) + " peers");
  }
}

void Exponential::offsets(At at, std::vector<int>& far) const {
  const int peers = std::min(std::prev(peers_.upper_bound(at.round))->second, exponents_);
  const std::uint64_t first = at.round * static_cast<std::uint64_t>(peers);
  far.clear();
  for (int peer = 0; peer < peers; ++peer)
    far.push_back(1 << (first + static_cast<std::uint64_t>(peer)) % static_cast<std::uint64_t>(exponents_));
}

void Exponential::row(At at, int rank, Row& row) const {
  if (size() == 1) return row.leave_alone();
  offsets(at, row.sources);
  for (int& source : row.sources) source = (rank + size() - source) % size();
  row.average();
}

void Exponential::destinations(At at, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (size() == 1) return;
  offsets(at, ranks);
  for (int& destination : ranks) destination = (rank + destination) % size();
}

Dissemination::Dissemination(int size, std::uint64_t seed)
    : Topology(size), exponents_(exponents_of(size)), seed_(seed) {}

void Dissemination::row(At at, int rank, Row& row) const {
  if (size() == 1) return row.leave_alone();
  const auto cycle = static_cast<std::uint64_t>(exponents_);
  row.sources.assign(1, along(permutation(size(), seed_, at.round / cycle, 0), size(), rank, -(1 << at.round % cycle)));
  row.average();
}

void Dissemination::destinations(At at, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (size() == 1) return;
  const auto cycle = static_cast<std::uint64_t>(exponents_);
  ranks.push_back(along(permutation(size(), seed_, at.round / cycle, 0), size(), rank, 1 << at.round % cycle));
}

RandomPull::RandomPull(int size, std::uint64_t seed, int segments, int replicas)
    : Topology(size), seed_(seed), segments_(segments), replicas_(replicas) {
  if (segments < 1) throw UsageError("segments=" + std::to_string(segments) + ": must be at least 1");
  if (replicas < 1 || (size > 1 && replicas > size - 1)) {
    throw UsageError("replicas=" + std::to_string(replicas) + ": a segment can be pulled from 1 to " +
                     std::to_string(size - 1) + " of the other workers");
  }
}

// A worker's pulls of one round, in the order of (segment, replica), go round a shuffled cycle of the other workers. So
// the replicas of a segment come from different workers, and size - 1 pulls reach all other workers.
void RandomPull::row(At at, int rank, Row& row) const {
  if (size() == 1) return row.leave_alone();
  const Permutation others = permutation(size() - 1, seed_, at.round, static_cast<std::uint64_t>(rank));
  row.sources.clear();
  for (int replica = 0; replica < replicas_; ++replica) {
    const auto pull = (at.segment % static_cast<std::uint32_t>(segments_)) * static_cast<std::uint32_t>(replicas_) +
                      static_cast<std::uint32_t>(replica);
    const int other = static_cast<int>(others(pull % static_cast<std::uint32_t>(size() - 1)));
    row.sources.push_back(other < rank ? other : other + 1);
  }
  row.average();
}

void RandomPull::destinations(At at, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  const auto others_count = static_cast<std::uint32_t>(size() - 1), replicas = static_cast<std::uint32_t>(replicas_);
  const std::uint32_t first = at.segment % static_cast<std::uint32_t>(segments_) * replicas;
  for (int other = 0; other < size(); ++other) {
    if (other == rank) continue;
    const Permutation others = permutation(size() - 1, seed_, at.round, static_cast<std::uint64_t>(other));
    const std::uint32_t place = others.inverse(static_cast<std::uint32_t>(rank < other ? rank : rank - 1));
    if ((place + others_count - first % others_count) % others_count < replicas) ranks.push_back(other);
  }
}

RandomGroups::RandomGroups(int size, std::uint64_t seed, int peers)
    : Topology(size), seed_(seed), groups_(std::max(1, size / std::max(peers, 1))) {
  if (peers < 2 || (size > 1 && peers > size)) {
    throw UsageError("peers=" + std::to_string(peers) + ": from 2 to all " + std::to_string(size) +
                     " workers can average with each other");
  }
}

void RandomGroups::row(At at, int rank, Row& row) const {
  destinations(at, rank, row.sources);
  row.average();
}

// A group has the workers at every groups_-th place of a shuffle.
void RandomGroups::destinations(At at, int rank, std::vector<int>& ranks) const {
  const Permutation shuffled = permutation(size(), seed_, at.round, at.segment);
  const int own = static_cast<int>(shuffled(static_cast<std::uint32_t>(rank)));
  ranks.clear();
  for (int place = own % groups_; place < size(); place += groups_) {
    if (place != own) ranks.push_back(static_cast<int>(shuffled.inverse(static_cast<std::uint32_t>(place))));
  }
}

Grouped::Grouped(std::shared_ptr<const Topology> among, int group_size, bool leaders_only)
    : Topology(among->size() * group_size),
      among_(std::move(among)),
      group_size_(group_size),
      leaders_only_(leaders_only) {
  if (group_size < 1) throw UsageError("group_size=" + std::to_string(group_size) + ": must be at least 1");
}

void Grouped::row(At at, int rank, Row& row) const {
  if (leaders_only_ && rank % group_size_ != 0) return row.leave_alone();
  among_->row(at, rank / group_size_, row);
  for (int& source : row.sources) source *= group_size_;
}

void Grouped::destinations(At at, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (rank % group_size_ != 0) return;
  std::vector<int> groups;
  among_->destinations(at, rank / group_size_, groups);
  const int members = leaders_only_ ? 1 : group_size_;
  for (const int group : groups) {
    for (int member = 0; member < members; ++member) ranks.push_back(group * group_size_ + member);
  }
}

Star::Star(int size, int group_size) : Topology(size), group_size_(group_size) {
  if (group_size < 1 || size % group_size != 0) {
    throw UsageError("group_size=" + std::to_string(group_size) + " does not divide " + std::to_string(size) +
                     " workers into equal groups");
  }
}

void Star::row(At, int rank, Row& row) const {
  row.leave_alone();
  if (rank % group_size_ == 0) return;
  row.sources.assign(1, rank - rank % group_size_);
  row.keeps_own = false;
}

void Star::destinations(At, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (rank % group_size_ != 0) return;
  for (int member = 1; member < group_size_; ++member) ranks.push_back(rank + member);
}

Served::Served(int size, int workers) : Topology(size), workers_(workers) {
  if (workers < 1 || workers > size) {
    throw UsageError("workers=" + std::to_string(workers) + ": must be from 1 to the number of ranks, " +
                     std::to_string(size));
  }
}

void Mean::row(At, int rank, Row& row) const {
  row.leave_alone();
  if (rank >= workers()) return;
  all_but(rank, workers(), row.sources);
  row.average();
}

void Mean::destinations(At, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (rank < workers()) all_but(rank, workers(), ranks);
}

void ToOwner::row(At at, int rank, Row& row) const {
  row.leave_alone();
  if (rank != owner_of(at, size())) return;
  all_but(rank, workers(), row.sources);
  row.average();
  if (rank < workers()) return;
  row.keeps_own = false;
  row.scale = 1.0 / static_cast<double>(workers());
}

void ToOwner::destinations(At at, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (const int owner = owner_of(at, size()); owner != rank && rank < workers()) ranks.push_back(owner);
}

void FromOwner::row(At at, int rank, Row& row) const {
  row.leave_alone();
  const int owner = owner_of(at, size());
  if (owner == rank || rank >= workers()) return;
  row.sources.assign(1, owner);
  row.keeps_own = false;
}

void FromOwner::destinations(At at, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (rank == owner_of(at, size())) all_but(rank, workers(), ranks);
}

}  // namespace sordino::topology
