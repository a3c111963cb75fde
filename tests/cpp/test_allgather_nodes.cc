// All-gather among many nodes, polled in random order, some ranks often and others rarely. In every order all ranks get
// the blocks of all. Small blocks take a number of messages that grows as the logarithm of the nodes.
#include <algorithm>
#include <bit>
#include <random>

#include "check.h"
#include "engines.h"

using namespace sordino;
using namespace sordino::test;

namespace {

using Random = std::mt19937_64;

std::size_t draw(Random& random, std::size_t below) { return static_cast<std::size_t>(random() % below); }

std::int32_t value(int rank, std::size_t operation, std::size_t place) {
  return static_cast<std::int32_t>(static_cast<std::size_t>(rank) * 1'000'000 + operation * 10'000 + place);
}

Request gather_of(const std::string& name, const std::vector<std::int32_t>& block) {
  Request request;
  request.name = name;
  request.opcode = Opcode::kAllgather;
  request.tensors.push_back({DType::kInt32,
                             {static_cast<std::int64_t>(block.size())},
                             reinterpret_cast<const std::byte*>(block.data()),
                             nullptr});
  return request;
}

// Returns the node of each rank. The seed draws their order.
std::vector<int> layout_of(Random& random) {
  const std::size_t nodes = 1 + draw(random, 21), most = 1 + draw(random, 3);
  std::vector<int> layout;
  for (std::size_t node = 0; node < nodes; ++node)
    layout.insert(layout.end(), 1 + draw(random, most), static_cast<int>(node));
  if (draw(random, 2)) std::shuffle(layout.begin(), layout.end(), random);
  return layout;
}

void whatever_overtakes_what(std::uint64_t seed) {
  Random random(seed);
  const std::vector<int> layout = layout_of(random);
  Engines ranks(layout);
  constexpr std::size_t kOperations = 6;
  // Nothing at all, small blocks, and blocks that are together around the limit of 64 KiB.
  const std::size_t most = std::array<std::size_t, 4>{0, 5, 60, 16384 / layout.size() * 2 + 1}[draw(random, 4)];
  std::vector<std::vector<std::size_t>> counts(kOperations);
  std::vector<std::vector<std::vector<std::int32_t>>> blocks(kOperations);
  std::vector<std::vector<std::shared_ptr<Handle>>> handles(layout.size());
  for (std::size_t operation = 0; operation < kOperations; ++operation) {
    for (int rank = 0; rank < ranks.size(); ++rank) {
      auto& block = blocks[operation].emplace_back(draw(random, most + 1));
      for (std::size_t place = 0; place < block.size(); ++place) block[place] = value(rank, operation, place);
      counts[operation].push_back(block.size());
      handles[static_cast<std::size_t>(rank)].push_back(
          ranks[rank].scheduler.submit(gather_of(std::to_string(operation), block)));
    }
  }
  std::vector<std::size_t> patience, over(layout.size());
  for (std::size_t rank = 0; rank < layout.size(); ++rank) patience.push_back(1 + draw(random, 8));
  std::size_t wrong = 0, left = layout.size();
  for (int turn = 0; turn < 1'000'000 && left > 0; ++turn) {
    const std::size_t rank = draw(random, layout.size());
    if (draw(random, patience[rank]) > 0) continue;
    ranks[static_cast<int>(rank)].poll();
    for (std::size_t& next = over[rank]; next < kOperations && handles[rank][next]->done(); ++next) {
      const Handle& handle = *handles[rank][next];
      CHECK(!handle.error);
      const auto* found = reinterpret_cast<const std::int32_t*>(handle.results.at(0).data.get());
      for (int from = 0; from < ranks.size(); ++from) {
        for (std::size_t place = 0; place < counts[next][static_cast<std::size_t>(from)]; ++place)
          wrong += *found++ != value(from, next, place);
      }
      auto& own = blocks[next][rank];  // the caller may change it now
      std::fill(own.begin(), own.end(), -1);
      left -= next + 1 == kOperations;
    }
  }
  CHECK(left == 0, "seed", seed, "ranks that have not ended", left);
  CHECK(wrong == 0, "seed", seed, "wrong", wrong);
}

// A rank that is not the first of its node sends only its announcement. The first rank of a node also sends one message
// in each round of the tree. The coordinator also sends a decision to each rank.
void messages_grow_as_the_logarithm_of_the_nodes(int nodes, int node_size) {
  std::vector<int> layout;
  for (int node = 0; node < nodes; ++node) layout.insert(layout.end(), static_cast<std::size_t>(node_size), node);
  Engines ranks(layout);
  const auto run = [&](const std::string& name) {
    const std::vector<std::int32_t> block{1};
    std::vector<std::shared_ptr<Handle>> handles;
    for (int rank = 0; rank < ranks.size(); ++rank)
      handles.push_back(ranks[rank].scheduler.submit(gather_of(name, block)));
    ranks.settle();
    for (const auto& handle : handles) CHECK(handle->done() && !handle->error);
  };
  run("first");  // in which the ranks of a node find each other's memory
  const auto before = ranks.network().sent();
  run("second");
  const auto after = ranks.network().sent();
  const auto rounds = static_cast<std::uint64_t>(std::bit_width(static_cast<unsigned>(nodes)) + 1);
  for (int rank = 1; rank < ranks.size(); ++rank) {
    const auto place = static_cast<std::size_t>(rank);
    const std::uint64_t sent = after[place].messages - before[place].messages;
    CHECK(sent <= (rank % node_size == 0 ? 1 + rounds : 1), "rank", rank, "of nodes", nodes, "sent", sent);
  }
}

}  // namespace

int main() {
  for (std::uint64_t seed = 0; seed < 120; ++seed) whatever_overtakes_what(seed);
  for (const int nodes : {9, 16, 33}) {
    for (const int node_size : {1, 3}) messages_grow_as_the_logarithm_of_the_nodes(nodes, node_size);
  }
  messages_grow_as_the_logarithm_of_the_nodes(5, 1);
  return report();
}
