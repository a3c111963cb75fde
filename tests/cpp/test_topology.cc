// Topologies: what a pair of peers costs at any number of workers. Their properties are tests/python/test_topology.py.
#include <algorithm>
#include <chrono>

#include "check.h"
#include "topology/permutation.h"
#include "topology/topology.h"

using namespace sordino::topology;

namespace {

double nanoseconds_a_pair(int size) {
  using Clock = std::chrono::steady_clock;
  constexpr int kPairs = 20'000;
  const RandomCycle topology(size, 1);
  Row row;
  std::vector<int> destinations;
  double best = 1e9;
  for (int attempt = 0; attempt < 5; ++attempt) {
    const auto begin = Clock::now();
    for (int pair = 0; pair < kPairs; ++pair) {
      const At at{static_cast<std::uint64_t>(pair), static_cast<std::uint32_t>(attempt)};
      topology.row(at, pair % size, row);
      topology.destinations(at, pair % size, destinations);
    }
    const std::chrono::duration<double, std::nano> took = Clock::now() - begin;
    best = std::min(best, took.count() / kPairs);
  }
  std::printf("%d workers: %.0f ns a pair\n", size, best);
  return best;
}

void permutations_are_inverted() {
  for (const std::uint32_t size : {1u, 2u, 63u, 64u, 65u, 66u, 1000u, 1'000'003u}) {
    const Permutation permutation(size, 5);
    for (std::uint32_t i = 0; i < std::min(size, 2000u); ++i) {
      CHECK(permutation(i) < size);
      CHECK(permutation.inverse(permutation(i)) == i);
    }
  }
}

}  // namespace

int main() {
  permutations_are_inverted();
  for (const int size : {2, 64, 65, 1000, 1'000'000}) CHECK(nanoseconds_a_pair(size) < 1000);
  return sordino::test::report();
}
