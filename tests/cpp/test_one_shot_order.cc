// All-reduce in one shot between nodes, with polls in random order, late messages, late ranks and ranks that leave: all
// ranks end every turn with the same outcome and the same sums.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "engine/world.h"
#include "one_shot_calls.h"

using namespace sordino;
using namespace sordino::test;

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

using Random = std::mt19937_64;

std::size_t draw(Random& random, std::size_t below) { return static_cast<std::size_t>(random() % below); }

struct Kind {
  const char* name;
  std::size_t length;
  bool one_shot;
};
constexpr Kind kKinds[] = {{"small", 3, true}, {"large", 3000, true}, {"huge", 20'000, false}};

// A rank's series of operations, the same on all ranks. Each is called or submitted, sooner or later.
class Walker {
 public:
  Walker(Engine& engine, int rank, int ranks, Random& random, const std::vector<Kind>& kinds)
      : engine_(engine), rank_(rank), ranks_(ranks), random_(random), kinds_(kinds) {}

  bool done() const { return operation_ == kinds_.size() && !call_; }
  bool wrong() const { return wrong_; }

  void step() {
    if (done() || (!call_ && away_ > 0 && away_-- > 0)) return;
    if (!call_) {
      const Kind& kind = kinds_[operation_];
      call_.emplace(engine_, kind.name, value(), kind.length);
      waits_ = kind.one_shot && draw(random_, 5) > 0 && call_->enter();
      if (!waits_) handle_ = call_->submit();
    } else if (waits_ && (call_->over() || call_->in_vain())) {
      waits_ = false;
      if (call_->collect()) {
        finish();
      } else {
        handle_ = call_->submit();
      }
    } else if (!waits_ && handle_->done()) {
      wrong_ |= handle_->error != nullptr;
      finish();
    }
  }

 private:
  float value() const { return static_cast<float>((rank_ + 1) * static_cast<int>(operation_ + 1)); }
  void finish() {
    wrong_ |= !call_->has(static_cast<float>(static_cast<int>(operation_ + 1) * ranks_ * (ranks_ + 1) / 2));
    call_.reset();
    ++operation_;
    away_ = draw(random_, 8) ? draw(random_, 2) : draw(random_, 60);
  }

  Engine& engine_;
  const int rank_, ranks_;
  Random& random_;
  const std::vector<Kind> kinds_;  // by operation
  std::size_t operation_ = 0, away_ = 0;
  std::optional<Call> call_;
  bool waits_ = false;
  std::shared_ptr<Handle> handle_;
  bool wrong_ = false;
};

// Returns the number of operations that were done in one shot.
std::uint64_t whatever_overtakes_what(std::uint64_t seed) {
  Random random(seed);
  const std::vector<std::vector<int>> layouts{{0, 1},          {0, 0, 1, 1},    {0, 0, 0, 1},      {0, 1, 0, 1},
                                              {0, 0, 1, 2, 2}, {0, 1, 2, 3, 4}, {0, 0, 1, 1, 2, 3}};
  const std::vector<int>& nodes = layouts[draw(random, layouts.size())];
  const int size = static_cast<int>(nodes.size());
  Engines ranks(nodes);
  ranks.network().delay([&random] { return random() % 3 == 0; });
  std::vector<Kind> kinds(40, kKinds[0]);
  for (Kind& kind : kinds) {
    if (draw(random, 2) == 0) kind = kKinds[1 + draw(random, 4) / 3];
  }
  for (const auto& [name, length, one_shot] : kKinds) {
    std::vector<Call> calls;
    for (int rank = 0; rank < size; ++rank) calls.emplace_back(ranks[rank], name, 1.0f, length);
    std::vector<std::shared_ptr<Handle>> handles;
    for (Call& call : calls) handles.push_back(call.submit());
    while (!std::all_of(handles.begin(), handles.end(), [](const auto& handle) { return handle->done(); }))
      ranks.settle();
  }
  std::vector<Walker> walkers;
  for (int rank = 0; rank < size; ++rank) walkers.emplace_back(ranks[rank], rank, size, random, kinds);
  const auto all_done = [&] {
    return std::all_of(walkers.begin(), walkers.end(), [](const Walker& walker) { return walker.done(); });
  };
  const bool leave = random() % 2 == 0;  // each rank leaves when it is finished
  std::set<int> left;
  std::vector<std::size_t> weights(nodes.size(), 1);
  Time now = std::chrono::steady_clock::now();
  for (long polls = 0; !all_done() && polls < 200'000; ++polls) {
    if (polls % 64 == 0) {
      for (auto& weight : weights) weight = 1 + draw(random, 3) * draw(random, 10);
      const int one = static_cast<int>(draw(random, nodes.size())),
                other = static_cast<int>(draw(random, nodes.size()));
      if (one != other) ranks.network().cut(one, other, polls < 100'000 && draw(random, 4) == 0);
    }
    now += microseconds(draw(random, 500));
    std::size_t place = draw(random, std::accumulate(weights.begin(), weights.end(), std::size_t{0}));
    int rank = 0;
    while (place >= weights[static_cast<std::size_t>(rank)]) place -= weights[static_cast<std::size_t>(rank++)];
    if (left.contains(rank)) continue;
    Walker& walker = walkers[static_cast<std::size_t>(rank)];
    ranks[rank].poll(now);
    ranks[rank].scheduler.decline(now);
    walker.step();
    if (!leave || !walker.done()) continue;
    left.insert(rank);
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) ranks[rank].transport->post(peer, goodbye());
    }
  }
  CHECK(all_done(), "seed", seed);
  const std::uint64_t fast = ranks[0].common.traffic.one_shot.load();
  for (int rank = 0; rank < size; ++rank) {
    CHECK(!walkers[static_cast<std::size_t>(rank)].wrong(), "seed", seed, "rank", rank);
    CHECK(ranks[rank].common.traffic.one_shot.load() == fast, "seed", seed, "rank", rank);
  }
  return fast;
}

// Ranks are threads that run freely: some are late, and some submit their operations and wait for them.
void threads_in_any_order() {
  constexpr int kTurns = 1500;
  const std::vector<int> nodes{0, 0, 1, 1, 2};
  const Config config = Config::from_environment();
  std::vector<std::unique_ptr<World>> worlds;
  for (auto& transport : sim::Network(nodes).transports())
    worlds.push_back(std::make_unique<World>(std::move(transport), config));
  std::vector<int> wrong(nodes.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < static_cast<int>(nodes.size()); ++rank) {
    threads.emplace_back([&, rank] {
      World& world = *worlds[static_cast<std::size_t>(rank)];
      for (int turn = 0; turn < kTurns; ++turn) {
        Values values(3, static_cast<float>(turn * (rank + 1)));
        auto* data = reinterpret_cast<std::byte*>(values.data());
        if (turn % 500 == 90 * rank) std::this_thread::sleep_for(milliseconds(1));
        const bool usual = turn % 97 == rank;
        if (usual || !again(world, kSum, data)) world.wait(*world.submit_to_wait(allreduce_of("allreduce.x", values)));
        wrong[static_cast<std::size_t>(rank)] += values != Values(3, static_cast<float>(turn * 15));
      }
      world.shutdown();
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(nodes.size()));
  CHECK(worlds[0]->traffic().one_shot.load() > kTurns / 4);
}

}  // namespace

int main() {
  std::uint64_t fast = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) fast += whatever_overtakes_what(seed);
  CHECK(fast > 500, fast);
  threads_in_any_order();
  return report();
}
