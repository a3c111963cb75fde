// Crossover-SGD with a roulette that is not uniform: a matrix of weights says how often each pair exchanges.
//
// A round needs a permutation (each worker sends once and receives once), and the expectation of a random permutation
// is a doubly stochastic matrix. So the weights are scaled to the nearest such matrix (Sinkhorn), which is written once
// as a mixture of permutations (Birkhoff, von Neumann). Each round draws one of them. No round is filled rank by rank,
// so no draw can reach a dead end, and the draws follow the matrix exactly.
#pragma once

#include <vector>

#include "topology/topology.h"

namespace sordino::topology {

class Roulette : public Topology {
 public:
  static constexpr int kMost = 128;  // workers: set-up takes O(size^4) time and O(size^3) memory at worst

  // weights[i * size + j]: how often worker i sends to worker j, in any unit; the diagonal is zero. Throws UsageError
  // for anything else, for more than kMost workers, and if no permutation has only positive weights.
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
