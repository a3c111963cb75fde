// Crossover-SGD with a weighted roulette: a matrix says how often each pair of workers exchanges.
//
// A round needs a permutation (each worker sends once and receives once), and the expectation of a random permutation
// is a doubly stochastic matrix. So the weights are scaled once to such a matrix (Sinkhorn), which is decomposed into a
// mixture of permutations (Birkhoff, von Neumann). Each round draws one of them. So no draw can reach a dead end, as it
// could if a round were filled rank by rank, and the draws follow the matrix exactly.
#pragma once

#include <vector>

#include "topology/topology.h"

namespace sordino::topology {

class Roulette : public Topology {
 public:
  static constexpr int kMost = 128;  // workers; the constructor takes up to O(size^4) time and O(size^3) memory

  // weights[i * size + j]: how often worker i sends to worker j, in any unit, at least 0; the diagonal is 0. Throws
  // UsageError for other weights, or more than kMost workers, and if no permutation has only positive weights or
  // scaling fails.
  Roulette(int size, std::uint64_t seed, std::vector<double> weights);

  void row(At at, int rank, Row& row) const override;
  void destinations(At at, int rank, std::vector<int>& ranks) const override;

  // The doubly stochastic matrix that the draws follow, by rows.
  const std::vector<double>& probabilities() const { return probabilities_; }

 private:
  const std::uint8_t* drawn(At at) const;

  const std::uint64_t seed_;
  std::vector<double> probabilities_;
  std::vector<double> cumulative_;      // sums of the permutations' weights; the last is 1
  std::vector<std::uint8_t> sends_to_;  // [permutation * size + worker]
  std::vector<std::uint8_t> receives_from_;
};

}  // namespace sordino::topology
