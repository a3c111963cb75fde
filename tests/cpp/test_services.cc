// Services on worlds of threads: snapshots are whole and as new as possible, whichever ranks write and pull meanwhile;
// averages of two conserve the sum; messages arrive once and in order.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <numeric>
#include <thread>

#include "check.h"
#include "engine/world.h"
#include "engines.h"
#include "services/mailbox.h"
#include "services/pair_averaging.h"
#include "services/snapshot_store.h"
#include "services/snapshots.h"
#include "transport/sim/sim.h"
#include "wrapped.h"

using namespace sordino;

namespace {

using std::chrono::steady_clock;

constexpr int kMailbox = 0, kSnapshots = 1, kAveraging = 2;
constexpr double kDeadline = 60;

struct Rank {
  std::unique_ptr<World> world;
  std::shared_ptr<Mailbox> mailbox;
  std::shared_ptr<SnapshotStore> snapshots;
  std::shared_ptr<PairAveraging> averaging;
};

std::shared_ptr<const Layout> layout_of(std::size_t count) {
  return std::make_shared<Layout>(std::vector<TensorSpec>{{"w", DType::kFloat64, {static_cast<std::int64_t>(count)}}},
                                  std::size_t{1} << 40);
}

// Returns memory for a layout: slightly more than its tensors need, as its end is aligned.
std::vector<double> memory_of(const Layout& layout, double value) {
  return std::vector<double>(layout.bytes() / sizeof(double), value);
}

// Returns worlds of ranks on the given nodes. `shared`: node peers know the locations of each other's snapshots.
std::vector<Rank> make(const std::vector<int>& nodes, const std::shared_ptr<const Layout>& layout, bool shared) {
  std::vector<Rank> ranks;
  const Config config = Config::from_environment();
  for (auto& transport : sim::Network(nodes).transports()) {
    Rank& rank = ranks.emplace_back();
    rank.world = std::make_unique<World>(std::move(transport), config);
    rank.mailbox = std::make_shared<Mailbox>(rank.world->service_context(), kMailbox);
    rank.snapshots = std::make_shared<SnapshotStore>(rank.world->service_context(), kSnapshots, layout, rank.mailbox);
    rank.world->open_service(kMailbox, rank.mailbox);
    rank.world->open_service(kSnapshots, rank.snapshots);
    rank.world->tolerate_losses();
  }
  for (std::size_t here = 0; here < ranks.size(); ++here) {
    for (std::size_t there = 0; there < ranks.size(); ++there) {
      if (shared && nodes[here] == nodes[there])
        ranks[here].snapshots->connect(static_cast<int>(there), ranks[there].snapshots->location());
    }
  }
  return ranks;
}

bool ended(const Pull& pull) {
  const auto state = pull.state.load(std::memory_order_acquire);
  return state == Pull::State::kDone || state == Pull::State::kFailed;
}

// Waits for an event of a kind, and returns it; drops other events.
Mailbox::Event wait_for(Mailbox& mailbox, Mailbox::Event::Kind kind) {
  const auto limit = steady_clock::now() + std::chrono::duration<double>(kDeadline);
  while (steady_clock::now() < limit) {
    for (Mailbox::Event& event : mailbox.wait(1)) {
      if (event.kind == kind) return event;
    }
  }
  CHECK(false && "nothing came");
  return {};
}

std::shared_ptr<Pull> pull_now(Rank& rank, int peer) {
  auto pull = rank.snapshots->pull(peer, steady_clock::now());
  while (!ended(*pull)) rank.mailbox->wait(0.01);
  return pull;
}

// A writer marks every element with its version, at full speed. A pull gets a single version, and none that is older
// than a version published before the pull began.
void snapshots_are_whole(const std::vector<int>& nodes, bool shared, std::size_t count) {
  const auto layout = layout_of(count);
  std::vector<Rank> ranks = make(nodes, layout, shared);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> published{0};
  std::thread writer([&] {
    std::vector<double> values = memory_of(*layout, 0);
    for (std::uint64_t version = 1; !stop; ++version) {
      std::fill(values.begin(), values.end(), static_cast<double>(version));
      if (ranks[0].snapshots->publish(reinterpret_cast<const std::byte*>(values.data()), version)) published = version;
      if (!shared) std::this_thread::yield();
    }
  });
  while (published == 0) std::this_thread::yield();
  std::vector<std::thread> readers;
  for (std::size_t me = 1; me < ranks.size(); ++me) {
    readers.emplace_back([&, me] {
      std::uint64_t last = 0;
      for (int turn = 0; turn < 60; ++turn) {
        const std::uint64_t least = published;
        const auto pull = pull_now(ranks[me], 0);
        CHECK(pull->state == Pull::State::kDone);
        const auto* values = reinterpret_cast<const double*>(pull->values.get());
        const std::size_t torn = count - static_cast<std::size_t>(std::count(values, values + count, values[0]));
        CHECK(torn == 0);
        CHECK(static_cast<std::uint64_t>(values[0]) == pull->steps);
        CHECK(pull->steps >= least && pull->steps >= last);
        last = pull->steps;
        ranks[me].snapshots->discard(*pull);
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  stop = true;
  writer.join();
  CHECK(!shared || ranks[0].snapshots->unpublished() == 0);
}

void a_pull_begins_when_it_is_told_to() {
  const auto layout = layout_of(10);
  std::vector<Rank> ranks = make({0, 1}, layout, false);
  const std::vector<double> values = memory_of(*layout, 3);
  ranks[1].snapshots->publish(reinterpret_cast<const std::byte*>(values.data()), 7);
  const auto start = steady_clock::now() + std::chrono::milliseconds(30);
  const auto pull = ranks[0].snapshots->pull(1, start);
  while (!ended(*pull)) ranks[0].mailbox->wait(0.01);
  CHECK(pull->begun >= start && pull->begun < start + std::chrono::milliseconds(500));
  CHECK(pull->steps == 7 && pull->version == 1);
  std::vector<double> mine(10, 1.0);
  ranks[0].snapshots->average(*pull, reinterpret_cast<std::byte*>(mine.data()));
  CHECK(mine == std::vector<double>(10, 2.0));
  CHECK_THROWS(UsageError, ranks[0].snapshots->average(*pull, reinterpret_cast<std::byte*>(mine.data())));
  const auto never = ranks[0].snapshots->pull(1, start + std::chrono::hours(1));
  ranks[0].snapshots->cancel(never);
  while (!ended(*never)) ranks[0].mailbox->wait(0.01);
  CHECK(never->state == Pull::State::kFailed);
}

void a_pull_waits_for_the_first_snapshot() {
  for (const bool shared : {false, true}) {
    const auto layout = layout_of(10);
    std::vector<Rank> ranks = make(shared ? std::vector<int>{0, 0} : std::vector<int>{0, 1}, layout, shared);
    const auto pull = ranks[0].snapshots->pull(1, steady_clock::now());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!ended(*pull));
    const std::vector<double> values = memory_of(*layout, 3);
    ranks[1].snapshots->publish(reinterpret_cast<const std::byte*>(values.data()), 1);
    while (!ended(*pull)) ranks[0].mailbox->wait(0.01);
    CHECK(pull->state == Pull::State::kDone);
  }
}

void a_peer_that_leaves_fails_its_pulls_alone() {
  const auto layout = layout_of(10);
  std::vector<Rank> ranks = make({0, 1, 2}, layout, false);
  const std::vector<double> values = memory_of(*layout, 3);
  ranks[2].snapshots->publish(reinterpret_cast<const std::byte*>(values.data()), 1);
  const auto pull = ranks[0].snapshots->pull(1, steady_clock::now());  // rank 1 never publishes
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ranks[1].world->shutdown();
  CHECK(wait_for(*ranks[0].mailbox, Mailbox::Event::Kind::kDone).number == pull->number);
  CHECK(pull->state == Pull::State::kFailed && pull->failure.find("rank 1") != std::string::npos);
  CHECK(pull_now(ranks[0], 1)->state == Pull::State::kFailed);
  CHECK(pull_now(ranks[0], 2)->state == Pull::State::kDone);
  ranks[0].world->shutdown();
  CHECK(ranks[0].snapshots->pull(2, steady_clock::now())->state == Pull::State::kFailed);
  CHECK_THROWS(Error, for (;;) ranks[0].mailbox->wait(0));  // after all earlier events
}

// A pull fails if it begins after its peer has closed its store, even if the peer has not left.
void a_peer_that_closes_fails_later_pulls(bool shared) {
  const auto layout = layout_of(10);
  std::vector<Rank> ranks = make(shared ? std::vector<int>{0, 0} : std::vector<int>{0, 1}, layout, shared);
  const std::vector<double> values = memory_of(*layout, 3);
  ranks[1].snapshots->publish(reinterpret_cast<const std::byte*>(values.data()), 1);
  CHECK(pull_now(ranks[0], 1)->state == Pull::State::kDone);
  ranks[1].world->close_service(kSnapshots);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time to hear of it
  const auto pull = ranks[0].snapshots->pull(1, steady_clock::now());
  const auto limit = steady_clock::now() + std::chrono::duration<double>(kDeadline / 6);
  while (!ended(*pull) && steady_clock::now() < limit) ranks[0].mailbox->wait(0.01);
  CHECK(pull->state == Pull::State::kFailed);
}

// A snapshot in flight does not change. While two of them occupy slots, there is no slot for a snapshot after the
// newest. When one has been sent, its slot is free again.
void what_was_sent_gives_its_place_back() {
  const auto layout = layout_of(10);
  test::Engines ranks({0, 1, 2});
  std::vector<std::shared_ptr<SnapshotStore>> stores;
  for (int me = 0; me < ranks.size(); ++me) {
    ServiceHost& host = ranks[me].services;
    const auto mailbox = std::make_shared<Mailbox>(host, kMailbox);
    stores.push_back(std::make_shared<SnapshotStore>(host, kSnapshots, layout, mailbox));
    host.open(kSnapshots, stores.back());
  }
  const auto publish = [&](std::uint64_t steps) {
    const std::vector<double> values = memory_of(*layout, static_cast<double>(steps));
    return stores[2]->publish(reinterpret_cast<const std::byte*>(values.data()), steps);
  };
  std::vector<std::shared_ptr<Pull>> pulls;
  for (const int me : {0, 1}) {
    CHECK(publish(pulls.size() + 1));
    pulls.push_back(stores[static_cast<std::size_t>(me)]->pull(2, steady_clock::now()));
    ranks[me].poll();  // asks
    ranks[2].poll();   // sends, and no rank receives it yet
  }
  CHECK(publish(3) && !publish(4));
  ranks.settle();
  for (std::size_t i = 0; i < pulls.size(); ++i) {
    CHECK(pulls[i]->state == Pull::State::kDone && pulls[i]->steps == i + 1);
    CHECK(*reinterpret_cast<const double*>(pulls[i]->values.get()) == static_cast<double>(i + 1));
  }
  CHECK(publish(5) && publish(6));
}

// Ranks ask again and again for snapshots that cannot be sent to them: each failure frees a slot.
void what_could_not_be_sent_gives_its_place_back() {
  const auto layout = layout_of(10);
  test::Engines ranks({0, 1}, Config::from_environment(), [](std::unique_ptr<Transport> own) {
    return std::make_unique<test::Unreachable>(std::move(own));
  });
  std::vector<std::shared_ptr<SnapshotStore>> stores;
  for (int me = 0; me < ranks.size(); ++me) {
    ServiceHost& host = ranks[me].services;
    stores.push_back(
        std::make_shared<SnapshotStore>(host, kSnapshots, layout, std::make_shared<Mailbox>(host, kMailbox)));
    host.open(kSnapshots, stores.back());
  }
  const std::vector<double> values = memory_of(*layout, 1);
  for (std::uint64_t step = 1; step <= 6; ++step) {
    CHECK(stores[1]->publish(reinterpret_cast<const std::byte*>(values.data()), step), "step", step);
    stores[0]->pull(1, steady_clock::now());
    ranks[0].poll();  // asks
    ranks[1].poll();  // cannot send
  }
}

// A reader's memory that stops the reader in the middle of a copy until another action is done: its second page exists
// only then.
class HeldUp {
 public:
  HeldUp(std::size_t bytes, std::function<void()> meanwhile) : bytes_(bytes), meanwhile_(std::move(meanwhile)) {
    page_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    data_ = static_cast<std::byte*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(data_ + page_, page_, PROT_NONE);
    only_ = this;
    struct sigaction action{};
    action.sa_handler = [](int) { only_->go_on(); };
    sigaction(SIGSEGV, &action, &before_);
  }
  ~HeldUp() {
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(data_, bytes_);
  }
  std::byte* data() { return data_; }
  bool was_held_up() const { return held_up_; }

 private:
  void go_on() {
    held_up_ = true;
    mprotect(data_ + page_, page_, PROT_READ | PROT_WRITE);
    meanwhile_();
  }

  static inline HeldUp* only_ = nullptr;
  const std::size_t bytes_;
  const std::function<void()> meanwhile_;
  std::size_t page_ = 0;
  std::byte* data_ = nullptr;
  bool held_up_ = false;
  struct sigaction before_{};
};

// The owner goes through all its slots while a peer copies one of them: the peer begins again.
void a_copy_that_was_overtaken_is_made_again() {
  constexpr std::size_t kCount = 1 << 16;
  auto world = sim::Network({0}).transports();
  Snapshots snapshots(world[0]->node_memory(), kCount * sizeof(double));
  std::vector<double> values(kCount);
  std::uint64_t steps = 0;
  const auto publish = [&] {
    std::fill(values.begin(), values.end(), static_cast<double>(++steps));
    CHECK(snapshots.publish(reinterpret_cast<const std::byte*>(values.data()), steps) == steps);
  };
  publish();
  HeldUp memory(kCount * sizeof(double), [&] {
    for (int place = 0; place < Snapshots::kPlaces; ++place) publish();
  });
  const auto facts = snapshots.copy_newest(snapshots.segment()->data, memory.data());
  CHECK(memory.was_held_up() && facts && facts->steps == steps);
  const auto* copied = reinterpret_cast<const double*>(memory.data());
  CHECK(std::count(copied, copied + kCount, static_cast<double>(steps)) == kCount);
}

// An averaging between two ranks, and the number of messages on which the polling thread has acted.
class Watched : public Service {
 public:
  explicit Watched(std::shared_ptr<PairAveraging> averaging) : averaging_(std::move(averaging)) {}
  void receive(int from, Reader& reader) override {
    averaging_->receive(from, reader);
    ++received_;
  }
  bool advance(Time now) override {
    const int received = received_;
    const bool moved = averaging_->advance(now);
    acted_on_ = received;
    return moved;
  }
  void lost(int rank) override {
    averaging_->lost(rank);
    ++received_;
  }
  void end(std::exception_ptr why) override { averaging_->end(why); }
  bool settled() const override { return averaging_->settled(); }

  // Waits until this many messages have come, including the news of a loss, and their effects are done.
  void wait_until_acted_on(int messages) const {
    const auto limit = steady_clock::now() + std::chrono::duration<double>(kDeadline);
    while (acted_on_ < messages && steady_clock::now() < limit) std::this_thread::yield();
    CHECK(acted_on_ >= messages);
  }

 private:
  const std::shared_ptr<PairAveraging> averaging_;
  int received_ = 0;
  std::atomic<int> acted_on_{0};
};

struct Pair {
  std::vector<std::vector<double>> values;
  std::vector<std::shared_ptr<Watched>> watched{};
  std::vector<Rank> ranks{};

  explicit Pair(std::vector<std::vector<double>> initial) : values(std::move(initial)) {
    const auto layout = layout_of(values[0].size());
    ranks = make({0, 1}, layout, false);
    for (std::size_t me = 0; me < 2; ++me) {
      values[me].resize(layout->bytes() / sizeof(double));
      auto* mine = reinterpret_cast<std::byte*>(values[me].data());
      ranks[me].averaging = std::make_shared<PairAveraging>(ranks[me].world->service_context(), kAveraging, layout,
                                                            mine, ranks[me].mailbox);
      watched.push_back(std::make_shared<Watched>(ranks[me].averaging));
      ranks[me].world->open_service(kAveraging, watched[me]);
    }
  }
  ~Pair() {
    for (Rank& rank : ranks) rank.world->shutdown();
  }
  Mailbox::Event done(int me) { return wait_for(*ranks[me].mailbox, Mailbox::Event::Kind::kDone); }
  // Lets rank 1 average. Rank 0 has sent and received everything, but a step of its own delays its averaging.
  void average_on_one_side(std::uint64_t number) {
    ranks[1].averaging->lock();
    for (int me = 0; me < 2; ++me) ranks[me].averaging->begin(1 - me, number);
    watched[0]->wait_until_acted_on(1);  // it has copied its values
    ranks[0].averaging->lock();
    ranks[1].averaging->unlock();
    const Mailbox::Event event = done(1);
    CHECK(event.number == number && event.text.empty());
    CHECK(ranks[0].mailbox->wait(0).empty());
  }
};

// Two workers average again and again while each adds to its own values: all additions are there at the end.
void averages_conserve_the_sum() {
  constexpr std::size_t kCount = 70001;
  Pair pair({std::vector<double>(kCount), std::vector<double>(kCount)});
  auto& [values, watched, ranks] = pair;
  for (int me = 0; me < 2; ++me) std::iota(values[me].begin(), values[me].begin() + kCount, 1000.0 * me);
  const auto worker = [&](int me) {
    for (std::uint64_t turn = 1; turn <= 50; ++turn) {
      ranks[me].averaging->begin(1 - me, turn);
      for (int step = 0; step < 3; ++step) {
        ranks[me].averaging->lock();
        for (double& value : values[me]) value += 0.5;
        ranks[me].averaging->unlock();
      }
      CHECK(wait_for(*ranks[me].mailbox, Mailbox::Event::Kind::kDone).number == turn);
    }
  };
  std::thread other(worker, 1);
  worker(0);
  other.join();
  for (std::size_t i = 0; i < kCount; ++i) {
    const double sum = 2.0 * static_cast<double>(i) + 1000.0 + 2 * 50 * 3 * 0.5;
    CHECK(std::abs(values[0][i] + values[1][i] - sum) < 1e-6);
    CHECK(std::abs(values[0][i] - values[1][i]) < 4);
  }
  // Nothing changes meanwhile, so both sides have exactly the same mean.
  for (int me = 0; me < 2; ++me) ranks[me].averaging->begin(1 - me, 1000);
  for (int me = 0; me < 2; ++me) wait_for(*ranks[me].mailbox, Mailbox::Event::Kind::kDone);
  CHECK(values[0] == values[1]);
  // A peer that leaves changes nothing.
  const auto before = values[0];
  ranks[0].averaging->begin(1, 1001);
  ranks[1].world->shutdown();
  CHECK(!wait_for(*ranks[0].mailbox, Mailbox::Event::Kind::kDone).text.empty());
  CHECK(values[0] == before);
}

// A rank that has averaged may go on to the next averaging, or leave, while a step still delays the averaging of the
// other. The other averages in the end.
void one_side_is_held_up() {
  Pair pair({{0.0}, {4.0}});
  auto& [values, watched, ranks] = pair;
  pair.average_on_one_side(1);
  CHECK(values[0][0] == 0.0 && values[1][0] == 2.0);
  ranks[1].averaging->begin(0, 2);
  watched[0]->wait_until_acted_on(3);  // rank 1's messages: ready, address, ready for the next
  values[0][0] += 1;
  ranks[0].averaging->unlock();
  CHECK(pair.done(0).number == 1);
  CHECK(values[0][0] == 3.0);
  ranks[0].averaging->begin(1, 2);
  for (int me = 0; me < 2; ++me) CHECK(pair.done(me).number == 2);
  CHECK(values[0][0] == 2.5 && values[1][0] == 2.5);
}

void one_side_goes(bool altogether) {
  Pair pair({{0.0}, {4.0}});
  pair.average_on_one_side(1);
  World& world = *pair.ranks[1].world;
  altogether ? world.shutdown() : world.close_service(kAveraging);
  pair.watched[0]->wait_until_acted_on(3);  // from rank 1: ready, address, gone
  pair.ranks[0].averaging->unlock();
  CHECK(pair.done(0).text.empty());
  CHECK(pair.values[0][0] == 2.0 && pair.values[1][0] == 2.0);
}

// One side has gone before the other begins. The other fails at once.
void one_side_has_gone(bool altogether) {
  Pair pair({{0.0}, {4.0}});
  World& world = *pair.ranks[1].world;
  altogether ? world.shutdown() : world.close_service(kAveraging);
  pair.watched[0]->wait_until_acted_on(1);  // it is gone
  pair.ranks[0].averaging->begin(1, 7);
  const auto limit = steady_clock::now() + std::chrono::duration<double>(kDeadline / 6);
  std::vector<Mailbox::Event> events;
  while (events.empty() && steady_clock::now() < limit) {
    for (Mailbox::Event& event : pair.ranks[0].mailbox->wait(0.1)) {
      if (event.kind == Mailbox::Event::Kind::kDone) events.push_back(std::move(event));
    }
  }
  CHECK(events.size() == 1 && events[0].number == 7 && !events[0].text.empty(), altogether);
  CHECK(pair.values[0][0] == 0.0);
}

// Averagings that had begun end with an error, and none can begin.
void averagings_end() {
  Pair pair({{0.0}, {4.0}});
  auto& averaging = *pair.ranks[0].averaging;
  averaging.begin(1, 1);
  pair.watched[1]->wait_until_acted_on(1);
  averaging.begin(1, 2);  // it has not begun yet
  pair.ranks[0].world->close_service(kAveraging);
  const std::vector<Mailbox::Event> events = pair.ranks[0].mailbox->wait(0);
  CHECK(events.size() == 2);
  for (std::size_t i = 0; i < events.size(); ++i)
    CHECK(events[i].number == i + 1 && events[i].text.find("closed") != std::string::npos);
  CHECK_THROWS(UsageError, averaging.begin(1, 3));
  pair.ranks[1].world->shutdown();
  CHECK_THROWS(Error, pair.ranks[1].averaging->begin(0, 3));
  CHECK(pair.values[0][0] == 0.0 && pair.values[1][0] == 4.0);
}

// Tags repeat after a while. An averaging that was cancelled, and whose values never came, must not get the values of a
// later one.
void an_averaging_after_a_cancelled_one_with_the_same_tag() {
  Pair pair({{0.0}, {4.0}});
  pair.ranks[1].averaging->lock();
  for (int me = 0; me < 2; ++me) pair.ranks[me].averaging->begin(1 - me, 1);
  pair.watched[0]->wait_until_acted_on(1);  // it has copied its values, and waits for those of rank 1
  pair.ranks[0].averaging->cancel();
  pair.ranks[1].averaging->cancel();
  pair.watched[1]->wait_until_acted_on(2);  // rank 0's messages: ready, tag
  pair.ranks[1].averaging->unlock();
  ServiceContext& context = pair.ranks[0].world->service_context();
  for (int used = 1; used < 1 << kTagSequenceBits; ++used) context.next_tag();
  for (int me = 0; me < 2; ++me) pair.ranks[me].averaging->begin(1 - me, 2);
  CHECK(pair.done(0).text.empty() && pair.done(1).text.empty());
  CHECK(pair.values[0][0] == 2.0 && pair.values[1][0] == 2.0);
}

void messages_arrive_once_and_in_order() {
  std::vector<Rank> ranks = make({0, 1}, layout_of(1), false);
  for (int number = 0; number < 1000; ++number) ranks[0].mailbox->send(number % 2, std::to_string(number));
  for (int me = 0; me < 2; ++me) {
    int expected = me;
    while (expected < 1000) {
      for (const Mailbox::Event& event : ranks[me].mailbox->wait(kDeadline)) {
        if (event.kind != Mailbox::Event::Kind::kMessage) continue;
        CHECK(event.rank == 0 && event.text == std::to_string(expected));
        expected += 2;
      }
    }
  }
  CHECK_THROWS(UsageError, ranks[0].mailbox->send(2, "nobody"));
  CHECK_THROWS(UsageError, ranks[0].mailbox->send(1, std::string(Mailbox::kLargest + 1, 'x')));
}

}  // namespace

int main() {
  for (const std::size_t count : {1, 1000, 300001}) {
    snapshots_are_whole({0, 0, 0}, true, count);
    snapshots_are_whole({0, 1, 2}, false, count);
    snapshots_are_whole({0, 0, 1}, false, count);
  }
  a_pull_begins_when_it_is_told_to();
  a_pull_waits_for_the_first_snapshot();
  a_peer_that_leaves_fails_its_pulls_alone();
  a_peer_that_closes_fails_later_pulls(false);
  a_peer_that_closes_fails_later_pulls(true);
  what_was_sent_gives_its_place_back();
  what_could_not_be_sent_gives_its_place_back();
  a_copy_that_was_overtaken_is_made_again();
  averages_conserve_the_sum();
  one_side_is_held_up();
  one_side_goes(false);
  one_side_goes(true);
  one_side_has_gone(false);
  one_side_has_gone(true);
  averagings_end();
  an_averaging_after_a_cancelled_one_with_the_same_tag();
  messages_arrive_once_and_in_order();
  return sordino::test::report();
}
