// The failure detector of one rank, with the time set by the test: deadlines to the second, losses, and the ranks that
// hear of them.
#include "base/log.h"
#include "check.h"
#include "engine/failure_detector.h"
#include "engines.h"

using namespace sordino;
using namespace sordino::test;

namespace {

constexpr double kWarn = 10, kTimeout = 20;

Config config() {
  Config config = Config::from_environment();
  config.stall_warn_s = kWarn;
  config.timeout_s = kTimeout;
  return config;
}

// Reader of the log lines during its life.
class Heard {
 public:
  Heard() { log::open(log::Level::kWarning); }
  ~Heard() {
    log::close();
    take();
  }
  int count(const std::string& what) {
    take();
    int found = 0;
    for (std::size_t at = text_.find(what); at != std::string::npos; at = text_.find(what, at + 1)) ++found;
    return found;
  }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  void take() {
    while (const auto line = log::take()) {
      CHECK(line->level == log::Level::kWarning);
      ranks_.push_back(line->rank);
      text_ += line->text + "\n";
    }
  }

  std::string text_;
  std::vector<int> ranks_;
};

// Returns the text of the error that watch() throws after some seconds; empty if it throws none.
template <class Error>
std::string thrown(Engine& engine, double seconds) {
  try {
    engine.failures.watch(engine.in(seconds));
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

void a_coordinator_warns_once_and_then_names_who_is_missing() {
  Engines ranks({0, 1, 2}, config());
  ranks[0].scheduler.submit(barrier_called("late"));
  const auto theirs = ranks[1].scheduler.submit(barrier_called("late"));
  ranks.settle();
  Heard heard;
  ranks[0].failures.watch(ranks[0].in(kWarn - 1));
  CHECK(heard.count("stalled") == 0);
  ranks[0].failures.watch(ranks[0].in(kWarn + 1));
  ranks[0].failures.watch(ranks[0].in(kWarn + 2));
  CHECK(heard.count("stalled: barrier 'late' has waited 11 s for rank 2") == 1);
  ranks.settle();
  ranks[1].failures.watch(ranks[1].in(kWarn + 5));  // it knows that this is reported
  CHECK(heard.count("stalled") == 1 && heard.ranks() == std::vector<int>{0});
  try {
    ranks[0].failures.watch(ranks[0].in(kTimeout + 1));
    CHECK(false && "no deadline");
  } catch (const Timeout& error) {
    CHECK(error.operation == "late" && (error.missing == std::vector<int>{2}));
    CHECK(std::string(error.what()).find("more than SORDINO_TIMEOUT_S") != std::string::npos);
  }
  CHECK(!theirs->done());
}

// A rank's own deadline has passed, but the coordinator is alive and misses other ranks, so it is not blamed.
void a_coordinator_that_has_reported_is_not_blamed() {
  Engines ranks({0, 1, 2}, config());
  ranks[0].scheduler.submit(barrier_called("late"));
  ranks[1].scheduler.submit(barrier_called("late"));
  ranks.settle();
  Heard heard;
  ranks[0].failures.watch(ranks[0].in(kWarn + 1));
  ranks.settle();
  CHECK(thrown<Timeout>(ranks[1], kTimeout + 10).empty());
  try {
    ranks[1].failures.watch(ranks[1].in(kTimeout + 21));
    CHECK(false && "no deadline");
  } catch (const Timeout& error) {
    CHECK(error.missing.empty());
    CHECK(std::string(error.what()).find("has reported that other ranks are missing") != std::string::npos);
  }
}

// The other rank keeps the timeout of the world.
void a_process_set_has_a_timeout_of_its_own() {
  Engines ranks({0, 1, 2}, config());
  ranks[0].scheduler.sets().at(0)->timeout_s = 1.5;
  ranks[0].scheduler.submit(barrier_called("late"));
  ranks[1].scheduler.submit(barrier_called("late"));
  ranks.settle();
  CHECK(thrown<Timeout>(ranks[1], 3).empty() && thrown<Timeout>(ranks[0], 1).empty());
  const std::string text = thrown<Timeout>(ranks[0], 2);
  CHECK(text.find("for rank 2, more than the timeout of its process set (1.5 s)") != std::string::npos, text);
}

// The whole job is stopped for an hour, again and again, while one rank waits for the coordinator. Then it runs on.
void time_in_which_the_process_was_stopped_is_no_wait() {
  Engines ranks({0, 1}, config());
  Time now = std::chrono::steady_clock::now();
  for (const int rank : {0, 1}) ranks[rank].common.clock.tick(now);
  ranks[1].scheduler.submit(barrier_called("x"));
  ranks.settle();
  const auto watch = [&](Time::duration step, int times) {
    std::string text;
    for (int rank : {0, 1}) {
      Time at = now;
      for (int time = 0; time < times; ++time) {
        ranks[rank].common.clock.tick(at += step);
        text += thrown<Timeout>(ranks[rank], 0);
      }
    }
    now += step * times;
    return text;
  };
  std::string stopped, late;
  int stalls = 0;
  {
    Heard heard;
    stopped = watch(std::chrono::hours(1), 5);
    stalls = heard.count("stalled");
    late = watch(std::chrono::milliseconds(100), static_cast<int>(kTimeout + 3) * 10);
  }
  CHECK(stopped.empty() && stalls == 0, stopped);
  CHECK(late.find("barrier 'x' has waited 20 s for rank 0") != std::string::npos, late);
  CHECK(late.find("rank 0, which coordinates it, is silent") != std::string::npos, late);
}

void between_two_ticks_a_clock_goes_on_for_a_while() {
  AwakeClock clock;
  const Time begin = std::chrono::steady_clock::now();
  CHECK(clock.now(begin + std::chrono::hours(1)) == AwakeTime());  // before the first
  clock.tick(begin);
  CHECK(clock.now(begin + std::chrono::milliseconds(30)) - clock.now() == std::chrono::milliseconds(30));
  CHECK(clock.now(begin + std::chrono::hours(1)) - clock.now() == AwakeClock::kLongestStep);
  CHECK(clock.now(begin - std::chrono::hours(1)) == clock.now());  // read before the last tick
}

void a_coordinator_that_says_nothing_is_blamed_later() {
  Engines ranks({0, 1}, config());
  ranks[1].scheduler.submit(barrier_called("mine"));
  ranks[1].poll();
  Heard heard;
  CHECK(thrown<Timeout>(ranks[1], kTimeout + 1).empty());  // it is given time to name the missing rank
  CHECK(heard.count("for rank 0, which coordinates it and is silent") == 1);
  CHECK(thrown<Timeout>(ranks[1], kTimeout + 3).find("rank 0, which coordinates it, is silent") != std::string::npos);
}

void joining_has_no_deadline() {
  for (const int rank : {0, 1}) {  // the coordinator, and another one
    Engines ranks({0, 1}, config());
    Request join = barrier_called("join");
    join.opcode = Opcode::kJoin;
    ranks[rank].scheduler.submit(join);
    ranks.settle();
    CHECK(thrown<Timeout>(ranks[rank], 1000).empty());
  }
}

void the_first_failure_stays_and_is_told_once() {
  Engines ranks({0, 1, 2}, config());
  const auto mine = ranks[0].scheduler.submit(barrier_called("x"));
  const auto theirs = ranks[1].scheduler.submit(barrier_called("y"));
  ranks.settle();
  ranks[0].failures.fail(std::make_exception_ptr(Timeout("too late", "x", {2})), true);
  ranks[0].failures.fail(std::make_exception_ptr(Error("another")), true);
  CHECK(error_of<Timeout>(*mine) == "too late" && ranks[0].common.failure.broken());
  CHECK_THROWS(Timeout, ranks[0].common.failure.rethrow());
  try {
    ranks[1].poll();
    CHECK(false && "it has not heard");
  } catch (const Timeout& error) {
    CHECK(error.operation == "x" && (error.missing == std::vector<int>{2}));
    ranks[1].failures.caught(std::current_exception());
  }
  CHECK(error_of<Timeout>(*theirs) == "too late");
  CHECK(!ranks[0].transport->poll(ranks[0].sink));  // rank 0 has told all ranks, so rank 1 does not
  int told = 0;
  ranks[2].transport->poll([&](int, std::span<const std::byte>) { ++told; });
  CHECK(told == 1);
}

void a_shutdown_is_no_failure() {
  Engines ranks({0, 1}, config());
  const auto mine = ranks[0].scheduler.submit(barrier_called("x"));
  ranks[0].failures.fail(std::make_exception_ptr(Error("shut down")), false);
  CHECK(error_of<Error>(*mine) == "shut down" && !ranks[0].common.failure.broken());
  CHECK(!ranks[1].poll());
}

void kill(Engines& ranks, int rank) {
  ranks.network().kill(rank);
  CHECK_THROWS(Error, ranks[rank].poll());
}

void a_loss_ends_the_world_or_what_needs_the_lost() {
  for (const bool tolerates : {false, true}) {
    Engines ranks({0, 1, 1}, config());
    const auto needs_it = ranks[0].scheduler.submit(barrier_called("all"));
    ranks[1].scheduler.submit(barrier_called("all"));
    ranks.settle();
    if (tolerates) ranks[0].common.peers.tolerate_losses();
    kill(ranks, 2);
    Heard heard;
    if (!tolerates) {
      CHECK(thrown<PeerLost>(ranks[0], 0).find("rank 2 on ") == 0);
      CHECK(!needs_it->done());
      continue;
    }
    CHECK(thrown<PeerLost>(ranks[0], 0).empty());
    CHECK(heard.count("Rank 0 continues without it") == 1 && ranks[0].common.peers.gone(2));
    ranks[0].poll();
    CHECK(error_of<PeerLost>(*needs_it).find("needs rank 2, which is lost: it was killed") != std::string::npos);
    CHECK(!ranks[0].common.failure.latched());
  }
}

void a_goodbye_is_no_loss() {
  Engines ranks({0, 1}, config());
  ranks[1].transport->post(0, goodbye());
  kill(ranks, 1);
  CHECK(thrown<PeerLost>(ranks[0], 0).empty());
  CHECK(ranks[0].common.peers.gone(1));
}

// Both ranks run an operation, and rank 1 leaves in the middle of it.
void who_leaves_in_the_middle_fails_what_runs() {
  enum class How { kWorld, kAlone, kServing };
  for (const How how : {How::kWorld, How::kAlone, How::kServing}) {
    Engines ranks({0, 1}, config());
    std::vector<float> mine(1 << 20), theirs(1 << 20);
    Request request = allreduce_of("x", mine);
    request.serving = how == How::kServing;
    const auto handle = ranks[0].scheduler.submit(std::move(request));
    ranks[1].scheduler.submit(allreduce_of("x", theirs));
    ranks[1].poll();
    ranks[0].poll();
    CHECK(!ranks[0].scheduler.settled());
    if (how == How::kAlone) ranks[0].common.peers.tolerate_losses();
    ranks[0].failures.note_left(1, true, "has shut down", " because of ValueError: no");
    CHECK(how == How::kServing || (thrown<PeerLost>(ranks[0], 0.5).empty() && !handle->done()));
    const std::string error = thrown<PeerLost>(ranks[0], 2);
    if (how == How::kWorld) {
      CHECK(error == "'x', which has begun, waits for rank 1, which has shut down because of ValueError: no");
    } else {
      CHECK(error.empty() && !error_of<PeerLost>(*handle).empty() && ranks[0].scheduler.settled());
    }
  }
}

// A ring: ranks 1 and 3 wait for rank 2, which is lost, and rank 0 only waits for them. No rank waits for the deadline.
void who_gives_up_an_operation_tells_the_others() {
  for (const int behind : {0, 3}) {  // this rank has yet to begin, or has begun as well
    Engines ranks({0, 1, 2, 3}, config());
    std::vector<std::vector<float>> values(4, std::vector<float>(1 << 20));
    std::vector<std::shared_ptr<Handle>> handles;
    for (int rank = 0; rank < 4; ++rank) {
      ranks[rank].common.peers.tolerate_losses();
      handles.push_back(ranks[rank].scheduler.submit(allreduce_of("x", values[static_cast<std::size_t>(rank)])));
      if (rank > 0) ranks[rank].poll();
    }
    for (int times = 0; times < 5; ++times) {
      for (const int rank : {0, 1, 3}) {
        if (rank != behind || rank == 0) ranks[rank].poll();
      }
    }
    kill(ranks, 2);
    std::string error;
    {
      const Heard heard;  // takes the warning that rank 1 continues without rank 2
      error = thrown<PeerLost>(ranks[1], 2);
    }
    CHECK(error.empty() && !error_of<PeerLost>(*handles[1]).empty(), error, behind);
    CHECK(!handles[0]->done() && !handles[3]->done());
    for (const int rank : {0, 3}) {
      ranks[rank].poll();
      const auto& handle = *handles[static_cast<std::size_t>(rank)];
      CHECK(error_of<PeerLost>(handle).find("rank 2") != std::string::npos, rank, error_of<PeerLost>(handle));
      CHECK(handle.given_up == (rank == 0 || behind == 0));  // otherwise it has not begun
      CHECK(ranks[rank].scheduler.settled() && !ranks[rank].common.failure.latched());
    }
  }
}

void nonsense_is_not_believed() {
  Engines ranks({0, 1}, config());
  const std::string text = "why";
  ranks[1].transport->post(
      0, Writer().put(Message::kFailed).put(Failure::kPeerLost).put(text).put(text).put(std::vector<int>{99}).take());
  CHECK_THROWS(TransportError, ranks[0].poll());
}

}  // namespace

int main() {
  a_coordinator_warns_once_and_then_names_who_is_missing();
  a_coordinator_that_has_reported_is_not_blamed();
  a_process_set_has_a_timeout_of_its_own();
  time_in_which_the_process_was_stopped_is_no_wait();
  between_two_ticks_a_clock_goes_on_for_a_while();
  a_coordinator_that_says_nothing_is_blamed_later();
  joining_has_no_deadline();
  the_first_failure_stays_and_is_told_once();
  a_shutdown_is_no_failure();
  a_loss_ends_the_world_or_what_needs_the_lost();
  a_goodbye_is_no_loss();
  who_leaves_in_the_middle_fails_what_runs();
  who_gives_up_an_operation_tells_the_others();
  nonsense_is_not_believed();
  return report();
}
