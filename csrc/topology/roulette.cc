#include "topology/roulette.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"
#include "base/rng.h"
#include "topology/matching.h"

namespace sordino::topology {
namespace {

constexpr double kNothing = 1e-12;  // probabilities below this are rounding errors

class Square {
 public:
  Square(int size, std::vector<double>& values) : size(size), values_(values) {}
  double& operator()(int row, int column) const {
    return values_[static_cast<std::size_t>(row) * static_cast<std::size_t>(size) + static_cast<std::size_t>(column)];
  }
  const int size;

 private:
  std::vector<double>& values_;
};

void check(int size, std::vector<double>& weights) {
  if (size > Roulette::kMost) {
    throw UsageError("a weighted roulette serves up to " + std::to_string(Roulette::kMost) + " workers, not " +
                     std::to_string(size) + "; without weights there is no limit");
  }
  const auto expected = static_cast<std::size_t>(size) * static_cast<std::size_t>(size);
  if (weights.size() != expected) {
    throw UsageError("the roulette of " + std::to_string(size) + " workers needs " + std::to_string(expected) +
                     " weights, not " + std::to_string(weights.size()));
  }
  const Square matrix(size, weights);
  for (int row = 0; row < size; ++row) {
    for (int column = 0; column < size; ++column) {
      const std::string entry = "roulette[" + std::to_string(row) + "][" + std::to_string(column) + "]";
      const double weight = matrix(row, column);
      if (!std::isfinite(weight) || weight < 0)
        throw UsageError(entry + " is " + std::to_string(weight) + "; weights must be finite and not negative");
      if (row == column && weight != 0) throw UsageError(entry + " is not zero, but no worker exchanges with itself");
    }
  }
}

// Clears the entries that are in no permutation of positive entries: scaling would need infinitely many passes to clear
// them. Given a perfect matching, (row, column) is in one exactly if `row` can be reached from the row matched with
// `column`.
void keep_support(const Square& matrix) {
  const int size = matrix.size;
  Matching matching(size, [&](int row, int column) { return matrix(row, column) > 0; });
  if (const int lonely = matching.complete(); lonely >= 0) {
    throw UsageError("no round can follow this roulette: worker " + std::to_string(lonely) +
                     " has no worker to send to after the others have chosen; give it more positive weights");
  }
  for (int column = 0; column < size; ++column) {
    std::vector<bool> reached(static_cast<std::size_t>(size), false);
    std::vector<int> frontier{matching.row_of(column)};
    reached[static_cast<std::size_t>(frontier.front())] = true;
    while (!frontier.empty()) {
      const int row = frontier.back();
      frontier.pop_back();
      for (int other = 0; other < size; ++other) {
        const int next = matching.row_of(other);
        if (matrix(row, other) <= 0 || reached[static_cast<std::size_t>(next)]) continue;
        reached[static_cast<std::size_t>(next)] = true;
        frontier.push_back(next);
      }
    }
    for (int row = 0; row < size; ++row) {
      if (!reached[static_cast<std::size_t>(row)]) matrix(row, column) = 0;
    }
  }
}

// Divides rows and columns by their sums in turn until all are 1 (Sinkhorn and Knopp 1967).
void balance(const Square& matrix) {
  constexpr int kMostPasses = 100'000;
  double error = 1;
  for (int pass = 0; pass < kMostPasses && error > kNothing; ++pass) {
    for (int row = 0; row < matrix.size; ++row) {
      double sum = 0;
      for (int column = 0; column < matrix.size; ++column) sum += matrix(row, column);
      for (int column = 0; column < matrix.size; ++column) matrix(row, column) /= sum;
    }
    error = 0;
    for (int column = 0; column < matrix.size; ++column) {
      double sum = 0;
      for (int row = 0; row < matrix.size; ++row) sum += matrix(row, column);
      error = std::max(error, std::abs(sum - 1));
      for (int row = 0; row < matrix.size; ++row) matrix(row, column) /= sum;
    }
  }
  if (error > 1e-6) throw UsageError("the roulette's weights differ too much from each other to be balanced");
}

}  // namespace

Roulette::Roulette(int size, std::uint64_t seed, std::vector<double> weights)
    : Topology(size), seed_(seed), probabilities_(std::move(weights)) {
  check(size, probabilities_);
  if (size == 1) return;
  keep_support({size, probabilities_});
  balance({size, probabilities_});
  std::vector<double> left = probabilities_;
  const Square rest(size, left);
  Matching matching(size, [&](int row, int column) { return rest(row, column) > kNothing; });
  double total = 0;
  while (total < 1 - size * kNothing && matching.complete() < 0) {
    double weight = 1;
    for (int row = 0; row < size; ++row) weight = std::min(weight, rest(row, matching.column_of(row)));
    for (int row = 0; row < size; ++row) {
      rest(row, matching.column_of(row)) -= weight;
      sends_to_.push_back(static_cast<std::uint8_t>(matching.column_of(row)));
    }
    for (int column = 0; column < size; ++column)
      receives_from_.push_back(static_cast<std::uint8_t>(matching.row_of(column)));
    cumulative_.push_back(total += weight);
  }
  for (double& bound : cumulative_) bound /= total;
}

const std::uint8_t* Roulette::drawn(At at) const {
  const double spun = rng::unit(rng::key(rng::key(seed_, at.round), at.segment));
  const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, spun);
  return sends_to_.data() + (found - cumulative_.begin()) * size();
}

void Roulette::row(At at, int rank, Row& row) const {
  if (size() == 1) return row.leave_alone();
  row.sources.assign(1, receives_from_[static_cast<std::size_t>(drawn(at) - sends_to_.data() + rank)]);
  row.average();
}

void Roulette::destinations(At at, int rank, std::vector<int>& ranks) const {
  ranks.clear();
  if (size() > 1) ranks.push_back(drawn(at)[rank]);
}

}  // namespace sordino::topology
