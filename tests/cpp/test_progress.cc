// Tasks: waiting, nesting, and the place where exceptions come out; and how often a rank that waits polls.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "progress/progress.h"
#include "progress/task.h"
#include "transport/sim/sim.h"

using sordino::Task;
using sordino::until;

namespace {

Task leaf(std::vector<int>& log, const bool& ready) {
  log.push_back(1);
  co_await until([&] { return ready; });
  log.push_back(2);
}

Task parent(std::vector<int>& log, const bool& ready) {
  log.push_back(0);
  co_await leaf(log, ready);
  log.push_back(3);
  co_await until([] { return true; });
  log.push_back(4);
}

void runs_up_to_what_it_waits_for() {
  std::vector<int> log;
  bool ready = false;
  Task task = parent(log, ready);
  CHECK(log.empty());  // nothing before the first resume
  CHECK(task.resume());
  CHECK((log == std::vector<int>{0, 1}) && !task.done());
  CHECK(!task.resume());
  ready = true;
  CHECK(task.resume());
  CHECK((log == std::vector<int>{0, 1, 2, 3, 4}) && task.done());
  CHECK(!task.resume());
}

Task fails(const bool& ready) {
  co_await until([&] { return ready; });
  throw std::runtime_error("broken");
}

Task catches(const bool& ready, bool& caught) {
  try {
    co_await fails(ready);
  } catch (const std::runtime_error&) {
    caught = true;
  }
}

Task passes_on(const bool& ready) { co_await fails(ready); }

Task side_by_side(std::vector<int>& log, const std::vector<bool>& ready) {
  const auto one = [](std::vector<int>& log, const std::vector<bool>& ready, std::size_t which) -> Task {
    for (std::size_t step = 0; step < 2; ++step) {
      co_await until([&, step] { return ready[2 * which + step]; });
      log.push_back(static_cast<int>(2 * which + step));
    }
  };
  std::vector<Task> tasks;
  for (const std::size_t which : {0, 1, 2}) tasks.push_back(one(log, ready, which));
  co_await sordino::together(std::move(tasks));
  log.push_back(6);
}

void tasks_side_by_side_go_on_in_any_order() {
  std::vector<int> log;
  std::vector<bool> ready(6);
  Task task = side_by_side(log, ready);
  task.resume();
  for (const std::size_t next : {2, 4, 0, 5, 3}) {
    CHECK(!task.resume());
    ready[next] = true;
    CHECK(task.resume() && !task.done() && log.back() == static_cast<int>(next));
  }
  ready[1] = true;
  CHECK(task.resume() && task.done());
  CHECK((log == std::vector<int>{2, 4, 0, 5, 3, 1, 6}));
}

Task fails(const bool& ready);

void one_of_several_that_fails_ends_them() {
  bool ready = false;
  const bool never = false;
  const auto both = [](const bool& ready, const bool& never) -> Task {
    std::vector<Task> tasks;
    tasks.push_back(fails(never));
    tasks.push_back(fails(ready));
    co_await sordino::together(std::move(tasks));
  };
  Task task = both(ready, never);
  task.resume();
  ready = true;
  CHECK_THROWS(std::runtime_error, task.resume());
}

void exceptions_reach_the_awaiting_task_or_resume() {
  bool ready = false, caught = false;
  Task catching = catches(ready, caught), passing = passes_on(ready);
  catching.resume();
  passing.resume();
  ready = true;
  catching.resume();
  CHECK(caught && catching.done());
  CHECK_THROWS(std::runtime_error, passing.resume());
  CHECK(passing.done());
}

void dropped_tasks_destroy_what_they_hold() {
  struct Count {
    int& value;
    explicit Count(int& value) : value(value) { ++value; }
    ~Count() { --value; }
  };
  int alive = 0;
  const bool never = false;
  const auto hold = [](int& counter, const bool& ready) -> Task {
    Count one(counter);
    co_await leaf(*std::make_unique<std::vector<int>>(), ready);
  };
  {
    Task task = hold(alive, never);
    task.resume();
    CHECK(alive == 1);
  }
  CHECK(alive == 0);
}

// A rank that waits until it is told to end, and sleeps for a second unless its bell rings.
class Resting {
 public:
  Resting() {
    waiter_ = std::thread([this] { progress.wait([this] { return over_.load(); }); });
    while (polls == 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until it sleeps
  }
  ~Resting() {
    over_ = true;
    progress.notify();
    waiter_.join();
  }

 private:
  const std::unique_ptr<sordino::Transport> transport_ = std::move(sordino::sim::Network({0}).transports().front());
  std::atomic<bool> over_{false};
  std::thread waiter_;

 public:
  std::atomic<int> polls{0};
  sordino::Progress progress{*transport_,
                             [this] {
                               ++polls;
                               return false;
                             },
                             [] { return sordino::Work::kUnderWay; },
                             [] { return true; },
                             std::chrono::microseconds(0),
                             std::chrono::seconds(1)};
};

// Otherwise hundreds of ranks on a core would do nothing but wake up.
void ranks_that_crowd_a_core_rest_longer() {
  Resting rank;
  const int before = rank.polls;
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK(rank.polls - before <= 3, rank.polls - before);
}

// A thread that needs the turn gets it from a thread that rests, each time long before the rest is over.
void a_thread_that_wants_the_turn_does_not_wait_for_a_rest() {
  Resting rank;
  const auto begin = std::chrono::steady_clock::now();
  int acted = 0;
  for (int turn = 0; turn < 20; ++turn) {
    rank.progress.alone([&] { ++acted; });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // it rests again
  }
  CHECK(acted == 20 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
}

// A thread that has held the turn since its call gives it up for signals, and then gets it back from a waiting thread.
// Otherwise the waiting thread would poll and rest again and again.
void a_thread_that_gave_the_turn_up_gets_it_back() {
  using std::chrono::milliseconds;
  const auto transport = std::move(sordino::sim::Network({0}).transports().front());
  sordino::Progress progress(
      *transport, [] { return false; }, [] { return sordino::Work::kUnderWay; }, [] { return true; },
      std::chrono::microseconds(0), std::chrono::seconds(1));
  std::atomic<bool> first_done{false}, first_over{false}, second_done{false};
  std::atomic<int> looks{0};
  std::thread first([&] {
    std::unique_lock<std::mutex> turn;
    while (!turn) turn = progress.try_turn();
    progress.poll_until(
        turn, [&] { return first_done.load(); }, 0,
        [&] {
          ++looks;
          std::this_thread::sleep_for(milliseconds(20));
        });
    first_over = true;
  });
  std::thread second([&] { progress.wait([&] { return second_done.load(); }); });
  while (looks < 2) std::this_thread::sleep_for(milliseconds(1)), progress.notify();
  std::this_thread::sleep_for(milliseconds(100));  // the second thread has the turn, and rests
  first_done = true;
  const auto limit = std::chrono::steady_clock::now() + milliseconds(700);
  progress.notify();
  while (!first_over && std::chrono::steady_clock::now() < limit) std::this_thread::sleep_for(milliseconds(1));
  CHECK(first_over.load());
  second_done = true;
  while (!first_over) std::this_thread::sleep_for(milliseconds(1)), progress.notify();
  progress.notify();
  first.join();
  second.join();
}

}  // namespace

int main() {
  runs_up_to_what_it_waits_for();
  tasks_side_by_side_go_on_in_any_order();
  one_of_several_that_fails_ends_them();
  exceptions_reach_the_awaiting_task_or_resume();
  dropped_tasks_destroy_what_they_hold();
  ranks_that_crowd_a_core_rest_longer();
  a_thread_that_wants_the_turn_does_not_wait_for_a_rest();
  a_thread_that_gave_the_turn_up_gets_it_back();
  return sordino::test::report();
}
