// Tasks: waiting, nesting, and the place where exceptions come out; and how often a rank that waits polls.
#include <chrono>
#include <memory>
#include <stdexcept>
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

// Polls of a rank that waits for 0.4 s, from 20 ms on, when it sleeps.
int polls_while_waiting(double crowd) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto past = [begin](int ms) { return Clock::now() - begin > std::chrono::milliseconds(ms); };
  const auto transport = std::move(sordino::sim::Network({0}).transports().front());
  int polls = 0;
  sordino::Progress progress(
      *transport,
      [&] {
        polls += past(20);
        return false;
      },
      [] { return sordino::Work::kUnderWay; }, [] { return true; }, std::chrono::microseconds(0), crowd);
  progress.wait([&] { return past(400); });
  return polls;
}

// Otherwise hundreds of ranks on a core would do nothing but wake up.
void ranks_that_crowd_a_core_rest_longer() { CHECK(polls_while_waiting(500) <= 8); }

}  // namespace

int main() {
  runs_up_to_what_it_waits_for();
  tasks_side_by_side_go_on_in_any_order();
  one_of_several_that_fails_ends_them();
  exceptions_reach_the_awaiting_task_or_resume();
  dropped_tasks_destroy_what_they_hold();
  ranks_that_crowd_a_core_rest_longer();
  return sordino::test::report();
}
