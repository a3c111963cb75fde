// Progress: calls poll(), the one function that moves all work of a rank forward. A waiting thread calls it. While no
// thread waits and work is under way, Progress's own thread does. So a blocking call needs no hand-over to another
// thread, and an asynchronous one proceeds while the caller computes. Knows no collective.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "transport/transport.h"

namespace sordino {

// Work that needs polling: none; some may remain after a recent move; or some is under way.
enum class Work { kNone, kRemains, kUnderWay };

class Progress {
 public:
  // `poll` returns whether anything moved, and must not throw. No two threads run it at once. `work` returns what needs
  // polling. `rings` returns whether all events that move work ring this rank's bell; if not, polls are more frequent.
  // `spin`: how long to poll before offering the core to other threads. `nap`: how long a waiting thread sleeps at
  // least, unless its bell rings; 0 for the usual time.
  Progress(Transport& transport, std::function<bool()> poll, std::function<Work()> work, std::function<bool()> rings,
           std::chrono::microseconds spin, std::chrono::microseconds nap);
  ~Progress() { stop(); }

  // Polls until done() is true. Several threads may call done() at once. `interrupt` is called about every 50 ms by the
  // waiting thread, which then holds no lock; an exception that it throws ends the wait. Empty: never.
  void wait(const std::function<bool()>& done, const std::function<void()>& interrupt = {});
  // Takes the turn; only the thread that holds it polls. The lock is not owned if another thread keeps the turn for
  // more than about a microsecond: that thread may be waiting.
  std::unique_lock<std::mutex> try_turn();
  // Polls until done() is true, and holds the turn except during calls of `interrupt`. `looks`: number of calls of
  // done() between two polls, if it can become true without a poll.
  void poll_until(std::unique_lock<std::mutex>& turn, const std::function<bool()>& done, int looks,
                  const std::function<void()>& interrupt);
  // Runs `action` while no thread polls.
  void alone(const std::function<void()>& action);
  // As alone(), but only if try_turn() succeeds. Returns whether `action` ran.
  bool try_alone(const std::function<void()>& action) {
    const std::unique_lock turn = try_turn();
    if (turn) action();
    return turn.owns_lock();
  }
  // Reports new work: wakes a thread that then polls.
  void notify();
  // Reports new work that the caller may wait for soon. Returns whether it is likely to wait at once, as it did last
  // time. Then no thread is woken to compete with it; Progress's own thread notices the work within a millisecond.
  bool expects_wait();
  // The caller waits for such work now.
  void note_wait();
  // Ends the thread; afterwards only waiting threads poll.
  void stop();

 private:
  class Interrupts;
  class Waiter;

  void run();
  std::chrono::microseconds tick();
  bool wakes() const;
  void poll_or_rest(const std::function<bool()>& done, std::chrono::steady_clock::time_point& idle_since);
  void pause(std::chrono::steady_clock::duration idle);
  void give_way();
  void take(std::unique_lock<std::mutex>& turn);
  void rest(std::uint32_t ticket, std::chrono::steady_clock::time_point idle_since);

  Transport& transport_;
  const std::function<bool()> poll_;
  const std::function<Work()> work_;
  const std::function<bool()> rings_;
  const std::chrono::microseconds spin_;
  const std::chrono::microseconds tick_, sleep_with_bell_;
  std::mutex turn_;             // held by the polling thread
  std::atomic<int> wanted_{0};  // threads that want the turn, for which a waiter makes way
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> waiters_{0};
  std::atomic<bool> thread_sleeps_{false}, sleeps_long_{false};
  // Whether the caller waited at once for its last asynchronous work; how many times work has come since the last wait,
  // and when the first of it came.
  std::atomic<bool> waits_at_once_{false};
  std::atomic<int> unwaited_{0};
  std::atomic<std::chrono::steady_clock::time_point> came_{};
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace sordino
