// Topologies: the time per pair of peers at any number of workers. Their properties are in
// tests/python/core/test_topology.py.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "check.h"
#include "topology/permutation.h"
#include "topology/topology.h"

using namespace sordino::topology;

namespace {

double nanoseconds_of_an_attempt(int size) {
  using Clock = std::chrono::steady_clock;
  constexpr int kPairs = 10'000;
  const RandomCycle topology(size, 1);
  Row row;
  std::vector<int> destinations;
  const auto begin = Clock::now();
  for (int pair = 0; pair < kPairs; ++pair) {
    const At at{static_cast<std::uint64_t>(pair), 0};
    topology.row(at, pair % size, row);
    topology.destinations(at, pair % size, destinations);
  }
  const std::chrono::duration<double, std::nano> took = Clock::now() - begin;
  return took.count() / kPairs;
}

// Returns the best of several attempts, each with both sizes in turn, so that other load affects both.
std::pair<double, double> nanoseconds_a_pair(int few, int many) {
  double least_of_few = nanoseconds_of_an_attempt(few), least_of_many = nanoseconds_of_an_attempt(many);
  for (int attempt = 1; attempt < 8; ++attempt) {
    least_of_few = std::min(least_of_few, nanoseconds_of_an_attempt(few));
    least_of_many = std::min(least_of_many, nanoseconds_of_an_attempt(many));
  }
  std::printf("%d workers: %.0f ns a pair, %d: %.0f ns\n", few, least_of_few, many, least_of_many);
  return {least_of_few, least_of_many};
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
  // A time in proportion to the number of workers would be a thousand times as long.
  const auto [few, many] = nanoseconds_a_pair(1000, 1'000'000);
  CHECK(many < 10 * few);
  return sordino::test::report();
}
