// Who turns the crank. One function, poll(), moves all work of a rank forward; it is called by whoever waits, or by
// a thread of ours when nobody waits and work is under way. So a blocking call needs no hand-over to another thread,
// and an asynchronous one still proceeds while the caller computes. Knows no collective.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "transport/transport.h"

namespace sordino {

// What is to be moved: nothing, what has moved lately and may have left something behind, or what is under way.
enum class Work { kNone, kRemains, kUnderWay };

class Progress {
 public:
  // `poll` returns whether anything moved and must not throw; it is never run by two threads at once.
  // `work` says what needs polling, `rings` whether whatever moves it rings this rank's bell: if not, it is looked at
  // more often. spin: how long to poll before the core is offered to others.
  Progress(Transport& transport, std::function<bool()> poll, std::function<Work()> work, std::function<bool()> rings,
           std::chrono::microseconds spin);
  ~Progress() { stop(); }

  // Polls until done() is true. done() may be called from several threads at once. `interrupt` is called every 50 ms by
  // the thread that waits, which holds no lock then; an exception that it throws ends the wait. Empty: never.
  void wait(const std::function<bool()>& done, const std::function<void()>& interrupt = {});
  // A thread that holds the turn is the only one to poll.
  std::unique_lock<std::mutex> take_turn() { return std::unique_lock(turn_); }
  // Polls until done() is true, with the turn held but for the calls of `interrupt`. `looks`: how often to look in
  // between, where it takes no poll to see that.
  void poll_until(std::unique_lock<std::mutex>& turn, const std::function<bool()>& done, int looks,
                  const std::function<void()>& interrupt);
  // Runs `action` while nobody polls.
  void alone(const std::function<void()>& action) {
    std::lock_guard turn(turn_);
    action();
  }
  // There is new work: wakes whoever is to poll.
  void notify();
  // Ends the thread; afterwards only wait() polls.
  void stop();

 private:
  class Interrupts;
  class Waiter;

  void run();
  std::chrono::microseconds tick();
  bool wakes() const;
  void poll_or_rest(const std::function<bool()>& done, std::chrono::steady_clock::time_point& idle_since);
  void pause(std::chrono::steady_clock::duration idle);
  void rest(std::uint32_t ticket, std::chrono::steady_clock::time_point idle_since);

  Transport& transport_;
  const std::function<bool()> poll_;
  const std::function<Work()> work_;
  const std::function<bool()> rings_;
  const std::chrono::microseconds spin_;
  std::mutex turn_;  // held by the thread that polls
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> waiters_{0};
  std::atomic<bool> thread_sleeps_{false}, sleeps_long_{false};
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace sordino
