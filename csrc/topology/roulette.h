// Crossover-SGD with a roulette that is not uniform: which pairs exchange how often follows a matrix of weights.
//
// A round needs a permutation (everybody sends once and receives once), and the expectation of a random permutation is
// a doubly stochastic matrix. So the weights are scaled to the nearest such matrix (Sinkhorn), which is written as a
// mixture of permutations (Birkhoff, von Neumann) once; a round then draws one of them. Nothing is filled in rank by
// rank, so no draw can come to a dead end, and the matrix is honoured exactly.
#pragma once

#include <vector>

#include "topology/topology.h"

namespace sordino::topology {

class Roulette : public Topology {
 public:
  static constexpr int kMost = 128;  // workers: set-up takes O(size^4) time and O(size^3) memory at worst

  // weights[i * size + j]: how often worker i sends to worker j, in any unit; the diagonal is zero. UsageError for
  // anything else, for more than kMost workers, and where no permutation has only positive weights.
  Roulette(int size, std::uint64_t seed, std::vector<double> weights);

  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

  // The doubly stochastic matrix that the draws follow, by rows.
  const std::vector<double>& probabilities() const { return probabilities_; }

 private:
  const std::uint8_t* drawn(At at) const;

  const std::uint64_t seed_;
  std::vector<double> probabilities_;
  std::vector<double> cumulative_;      // of the permutations' weights
  std::vector<std::uint8_t> sends_to_;  // by permutation and worker
  std::vector<std::uint8_t> receives_from_;
};

}  // namespace sordino::topology
