// Queues of simulated devices that meet: no queue continues before all are there, no thread waits, and a rank that has
// failed continues alone.
#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include "check.h"
#include "collectives/queue_barrier.h"
#include "device/sim/sim_device.h"
#include "engines.h"

using namespace sordino;
using namespace sordino::test;

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int kMost = 4;

bool comes(const std::function<bool()>& what, milliseconds limit = milliseconds(5000)) {
  for (const auto end = Clock::now() + limit; Clock::now() < end;) {
    if (what()) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return what();
}

// A queue that stands still until go_on().
class Held {
 public:
  explicit Held(Stream stream) {
    sim::enqueue(stream, [gate = gate_] { gate->wait(false); });
  }
  ~Held() { go_on(); }
  void go_on() {
    *gate_ = true;
    gate_->notify_all();
  }

 private:
  std::shared_ptr<std::atomic<bool>> gate_ = std::make_shared<std::atomic<bool>>(false);
};

// Ranks of one set, each with a device of its own.
struct Ranks {
  explicit Ranks(int size) : size(size) {
    std::vector<SharedBlock*> all;
    std::vector<int> world_ranks;
    for (int rank = 0; rank < size; ++rank) {
      all.push_back(&blocks[static_cast<std::size_t>(rank)]);
      world_ranks.push_back(10 + rank);
    }
    for (int rank = 0; rank < size; ++rank) {
      devices.push_back(sim::make_device(rank));
      barriers.push_back(QueueBarrier::make(devices.back(), all, world_ranks, rank));
      queues.push_back(barriers.back()->take_queue(devices.back()));
    }
  }
  void meet(int rank, std::vector<int> members, std::uint64_t stamp) {
    barriers[static_cast<std::size_t>(rank)]->meet(members, stamp);
    ends[static_cast<std::size_t>(rank)] =
        devices[static_cast<std::size_t>(rank)]->record(queues[static_cast<std::size_t>(rank)]);
  }
  bool over(int rank) { return ends[static_cast<std::size_t>(rank)]->done(); }

  const int size;
  std::vector<SharedBlock> blocks{kMost};
  std::vector<std::shared_ptr<Device>> devices;
  std::vector<std::unique_ptr<QueueBarrier>> barriers;
  std::vector<Stream> queues;
  std::vector<std::shared_ptr<Event>> ends{kMost};
};

void nobody_goes_on_before_all_are_there() {
  Ranks ranks(3);
  Held slow(ranks.queues[1]);  // its inputs are not ready
  const auto begun = Clock::now();
  for (int rank = 0; rank < 3; ++rank) ranks.meet(rank, {0, 1, 2}, 1);
  CHECK(Clock::now() - begun < milliseconds(1000));
  std::this_thread::sleep_for(milliseconds(30));
  CHECK(!ranks.over(0) && !ranks.over(1) && !ranks.over(2));
  slow.go_on();
  for (int rank = 0; rank < 3; ++rank) CHECK(comes([&] { return ranks.over(rank); }), rank);
}

// Some members take part in one operation and all in the next: which word belongs to which member does not change.
void members_keep_their_words() {
  Ranks ranks(3);
  for (const int rank : {0, 2}) ranks.meet(rank, {0, 2}, 1);
  for (int rank = 0; rank < 3; ++rank) ranks.meet(rank, {0, 1, 2}, 2);
  for (const int rank : {1, 2}) ranks.meet(rank, {1, 2}, 3);
  for (int rank = 0; rank < 3; ++rank) CHECK(comes([&] { return ranks.over(rank); }), rank);
  CHECK(ranks.blocks[0].told[1] == 2 && ranks.blocks[0].told[2] == 2 && ranks.blocks[1].told[2] == 3);
}

void who_is_late_is_named() {
  Ranks ranks(3);
  CHECK(ranks.barriers[0]->late().empty());
  Held slow(ranks.queues[1]);
  for (int rank = 0; rank < 3; ++rank) ranks.meet(rank, {0, 1, 2}, 5);
  CHECK(comes([&] { return ranks.blocks[1].told[0] == 5 && ranks.blocks[1].told[2] == 5; }));
  CHECK((ranks.barriers[0]->late() == std::vector<int>{11}));
  CHECK((ranks.barriers[1]->late() == std::vector<int>{11}));  // it knows that it is late itself
  slow.go_on();
  CHECK(comes([&] { return ranks.over(0) && ranks.over(1) && ranks.over(2); }));
  CHECK(comes([&] { return ranks.barriers[0]->late().empty(); }));
}

// A rank that has failed waits for no other, even when a peer's device that does not know of the failure writes its
// progress.
void who_has_failed_waits_for_nobody() {
  Ranks ranks(2);
  Held behind(ranks.queues[0]);  // of rank 0, so that its words are overwritten before it reads them
  ranks.meet(0, {0, 1}, 1);
  ranks.meet(0, {0, 1}, 2);
  ranks.barriers[0]->abandon();
  CHECK(comes([&] { return ranks.blocks[0].told[1] > 2; }));
  CHECK((ranks.barriers[1]->let_go() == std::vector<int>{10}));  // from now on rank 0's words mean nothing
  ranks.blocks[0].told[1] = 1;
  behind.go_on();
  CHECK(comes([&] { return ranks.over(0); }));
  ranks.meet(1, {0, 1}, 1);
  CHECK(comes([&] { return ranks.over(1); }));  // rank 0 had come there
  ranks.meet(1, {0, 1}, 3);
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(!ranks.over(1));  // no word says that rank 0 came here
  ranks.barriers[1]->abandon();
}

// Words of one rank are written in order, whichever of its devices it computes on.
void several_devices_of_one_rank() {
  Ranks ranks(2);
  const auto first = ranks.devices[0], other = sim::make_device(7);
  Held slow(ranks.queues[0]);
  ranks.meet(0, {0, 1}, 1);
  ranks.queues[0] = ranks.barriers[0]->take_queue(other);
  ranks.devices.front() = other;
  ranks.meet(0, {0, 1}, 2);
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(ranks.blocks[1].told[0] == 0);
  slow.go_on();
  ranks.meet(1, {0, 1}, 1);
  ranks.meet(1, {0, 1}, 2);
  CHECK(comes([&] { return ranks.over(0) && ranks.over(1); }));
}

// Events recorded on the device never happen, and queries throw.
void a_device_that_has_failed_holds_nobody_up() {
  Ranks ranks(2);
  ranks.meet(0, {0, 1}, 1);
  sim::fail(*ranks.devices[0]);
  ranks.barriers[0]->abandon();
  CHECK(ranks.barriers[0]->idle());
  CHECK((ranks.barriers[1]->let_go() == std::vector<int>{10}));
  ranks.blocks[0].told[1] = 1;  // so that the device's thread ends
}

void a_device_that_cannot_wait_has_none() {
  std::vector<SharedBlock> blocks(2);
  sim::Traits traits;
  traits.waits_for_words = false;
  CHECK(!QueueBarrier::make(sim::make_device(0, traits), {&blocks[0], &blocks[1]}, {0, 1}, 0));
  CHECK(QueueBarrier::make(sim::make_device(0), {&blocks[0], &blocks[1]}, {0, 1}, 0) != nullptr);
}

// Two ranks take part in many sets, in opposite orders. As all of a device's hardware queues would wait otherwise, some
// sets have no barrier: their ranks' threads wait.
void not_all_queues_wait() {
  constexpr std::size_t kSets = 12;
  const std::array devices{sim::make_device(0), sim::make_device(1)};
  std::vector<SharedBlock> blocks(2 * kSets);
  const auto make = [&](std::size_t set, int rank) {
    return QueueBarrier::make(devices[static_cast<std::size_t>(rank)], {&blocks[2 * set], &blocks[2 * set + 1]}, {0, 1},
                              rank);
  };
  std::array<std::vector<std::unique_ptr<QueueBarrier>>, 2> barriers;
  for (std::size_t set = 0; set < kSets; ++set) {
    for (const int rank : {0, 1}) {
      if (auto made = make(set, rank)) barriers[static_cast<std::size_t>(rank)].push_back(std::move(made));
    }
  }
  CHECK(barriers[0].size() == 4 && barriers[1].size() == 4, barriers[0].size());
  std::reverse(barriers[1].begin(), barriers[1].end());
  std::vector<std::shared_ptr<Event>> ends;
  const std::array members{0, 1};
  const auto meet_all = [&](std::size_t rank) {
    for (const auto& barrier : barriers[rank]) {
      const Stream queue = barrier->take_queue(devices[rank]);
      barrier->meet(members, 1);
      ends.push_back(devices[rank]->record(queue));
    }
  };
  const auto are_over = [&] {
    return std::all_of(ends.begin(), ends.end(), [](const auto& end) { return end->done(); });
  };
  meet_all(0);
  const auto computed = devices[0]->record(devices[0]->make_queue());
  CHECK(comes([&] { return computed->done(); }) && !are_over());
  meet_all(1);
  CHECK(comes(are_over));
  for (const auto& all : barriers) {
    for (const auto& barrier : all) barrier->abandon();  // so that a failed test ends, too
  }
  barriers[0].pop_back();
  CHECK(make(0, 0) != nullptr);  // a set that has ended leaves its queue to others
}

// A mapping may succeed but show other memory. Then operations go through the host.
void memory_that_is_not_the_peers_is_not_used() {
  for (const bool maps_others : {true, false}) {
    Engines ranks({0, 0, 0});
    sim::Traits traits;
    traits.maps_others = maps_others;
    const auto device = sim::make_device(0, traits);
    constexpr std::size_t kCount = 10'000;
    std::vector<std::shared_ptr<Segment>> memory;
    std::vector<std::shared_ptr<Handle>> handles;
    for (int rank = 0; rank < 3; ++rank) {
      memory.push_back(ranks[rank].transport->node_memory().allocate_on(device, kCount * sizeof(float)));
      auto* values = reinterpret_cast<float*>(memory.back()->data);
      std::fill_n(values, kCount, static_cast<float>(rank + 1));
      Request request;
      request.name = "sum";
      request.opcode = Opcode::kAllreduce;
      request.device = device;
      request.tensors.push_back(
          {DType::kFloat32, {static_cast<std::int64_t>(kCount)}, memory.back()->data, memory.back()->data});
      handles.push_back(ranks[rank].scheduler.submit(std::move(request)));
    }
    CHECK(comes([&] {
      ranks.settle();
      return std::all_of(handles.begin(), handles.end(), [](const auto& handle) { return handle->done(); });
    }));
    device->synchronize();
    for (const auto& segment : memory) {
      const auto* values = reinterpret_cast<const float*>(segment->data);
      CHECK(std::all_of(values, values + kCount, [](float x) { return x == 6; }), maps_others);
    }
  }
}

// A rank that has offered its tensor, but not read the others' locations yet, still finds the locations of this
// operation, although the others have begun the next one.
void where_tensors_lie_is_told_anew_when_all_have_read_it() {
  Engines ranks({0, 0, 0});
  const auto device = sim::make_device(0);
  constexpr std::size_t kCount = 40'000;
  std::vector<std::shared_ptr<Segment>> memory;
  const auto submit = [&](int rank, const std::string& name, float value) {
    memory.push_back(ranks[rank].transport->node_memory().allocate_on(device, kCount * sizeof(float)));
    auto* values = reinterpret_cast<float*>(memory.back()->data);
    std::fill_n(values, kCount, value);
    Request request;
    request.name = name;
    request.opcode = Opcode::kAllreduce;
    request.device = device;
    request.tensors.push_back(
        {DType::kFloat32, {static_cast<std::int64_t>(kCount)}, memory.back()->data, memory.back()->data});
    return std::pair(ranks[rank].scheduler.submit(std::move(request)), values);
  };
  const auto done = [](const auto& submitted) { return submitted.first->done(); };
  const std::array trial{submit(0, "trial", 1), submit(1, "trial", 1), submit(2, "trial", 1)};
  CHECK(comes([&] {
    ranks.settle();
    return done(trial[0]) && done(trial[1]) && done(trial[2]);
  }));
  const std::array first{submit(0, "first", 1), submit(1, "first", 2), submit(2, "first", 3)};
  for (const int rank : {1, 2}) ranks[rank].poll();      // announce
  for (int turn = 0; turn < 3; ++turn) ranks[0].poll();  // decides and offers
  ranks[2].poll();                                       // offers, and misses rank 1
  for (int turn = 0; turn < 1000 && !(done(first[0]) && done(first[1])); ++turn) {
    ranks[1].poll();
    ranks[0].poll();
  }
  CHECK(done(first[0]) && done(first[1]) && !done(first[2]));
  const std::array second{submit(0, "second", 10), submit(1, "second", 20), submit(2, "second", 30)};
  ranks[2].scheduler.announce();
  for (int turn = 0; turn < 100; ++turn) {
    ranks[0].poll();
    ranks[1].poll();
  }
  CHECK(comes([&] {
    ranks.settle();
    return done(first[2]) && done(second[0]) && done(second[1]) && done(second[2]);
  }));
  device->synchronize();
  for (const auto& [handle, values] : first)
    CHECK(std::all_of(values, values + kCount, [](float x) { return x == 6; }));
  for (const auto& [handle, values] : second)
    CHECK(std::all_of(values, values + kCount, [](float x) { return x == 60; }));
}

}  // namespace

int main() {
  nobody_goes_on_before_all_are_there();
  members_keep_their_words();
  who_is_late_is_named();
  who_has_failed_waits_for_nobody();
  several_devices_of_one_rank();
  a_device_that_has_failed_holds_nobody_up();
  a_device_that_cannot_wait_has_none();
  not_all_queues_wait();
  memory_that_is_not_the_peers_is_not_used();
  where_tensors_lie_is_told_anew_when_all_have_read_it();
  return report();
}
