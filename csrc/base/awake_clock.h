// Clock of all deadlines. It counts only the time in which this process ran, not the time in which it was stopped
// (Ctrl-Z, a suspended job, a paused container). So ranks that were stopped together continue together, and a rank that
// was stopped alone does not blame the others for it.
//
// Linux has no such clock. The polling thread ticks it at least every 100 ms (nap_for in engine/world.cc). So a much
// longer time between two ticks is time in which this process did not run.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

#include "base/time.h"

namespace sordino {

class AwakeClock {
 public:
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  // A separate type, so that a comparison with a time of another clock does not compile.
  using time_point = std::chrono::time_point<AwakeClock>;

  static constexpr duration kLongestStep = std::chrono::milliseconds(200);

  // `longest`: upper limit of the time that counts between two ticks.
  explicit AwakeClock(duration longest = kLongestStep) : longest_(longest) {}

  // Called by one thread at a time. `now` never goes back.
  void tick(Time now = std::chrono::steady_clock::now()) {
    if (last_.load() != Time{}) awake_.store(awake_.load() + step(now));
    last_.store(now);
  }

  // Time at the last tick. May be called from any thread.
  time_point now() const { return time_point(duration(awake_.load(std::memory_order_relaxed))); }
  // Time at `at`, now. May be called from any thread. Correct within `longest` while another thread ticks.
  time_point now(Time at) const { return now() + duration(last_.load() == Time{} ? 0 : step(at)); }

 private:
  rep step(Time now) const { return std::clamp<duration>(now - last_.load(), duration::zero(), longest_).count(); }

  const duration longest_;
  std::atomic<rep> awake_{0};
  std::atomic<Time> last_{};
};

using AwakeTime = AwakeClock::time_point;

// Deadline of a polling loop. Each call of passed() is a tick.
class Deadline {
 public:
  explicit Deadline(std::chrono::duration<double> limit) : limit_(limit) { clock_.tick(); }

  bool passed() {
    clock_.tick();
    return clock_.now().time_since_epoch() > limit_;
  }

 private:
  const std::chrono::duration<double> limit_;
  AwakeClock clock_;
};

}  // namespace sordino
