#include "progress/progress.h"

#include <sched.h>

#include <algorithm>

#include "base/relax.h"

namespace sordino {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Poll intervals of the thread. kTick: while nothing is under way, to notice lost peers and stalled operations that
// this rank coordinates, and to tick the clock of deadlines (which counts a much longer interval as time in which the
// process was stopped). kTickForRemains: while work may remain. It is not shorter because a thread that has just waited
// is likely to poll again, and should not be disturbed.
constexpr microseconds kTick{50000}, kTickForRemains{1000};
// Sleep of a thread that a bell wakes if something has come; it wakes by itself for lost peers and deadlines.
constexpr microseconds kSleepWithBell{2000};
// If ranks outnumber cores, a thread that waits for a computing rank first yields the core to it. It continues as soon
// as that rank's time slice ends. Waking a sleeping thread by a bell takes longer than most operations.
constexpr microseconds kYield{2000};
// Sleep without a bell: messages of other nodes ring none, nor do devices. Work that has not moved for long is polled
// less often, which makes a wait at most 1/64 longer and leaves the core to the thread that moves the bytes.
constexpr microseconds kLeastSleep{20}, kMostSleep{500};
// A wait that begins within kAtOnce of its work's arrival is "at once". After kForget without new work, no such wait is
// expected.
constexpr microseconds kAtOnce{100};
constexpr milliseconds kForget{100};
// Interval between two checks for signals in a wait. Ctrl-C must end a wait within 200 ms.
constexpr milliseconds kInterruptEvery{50};

}  // namespace

Progress::Progress(Transport& transport, std::function<bool()> poll, std::function<Work()> work,
                   std::function<bool()> rings, microseconds spin, microseconds nap)
    : transport_(transport),
      poll_(std::move(poll)),
      work_(std::move(work)),
      rings_(std::move(rings)),
      spin_(spin),
      tick_(std::max(kTick, nap)),
      sleep_with_bell_(std::max(kSleepWithBell, nap)) {
  thread_ = std::thread([this] { run(); });
}

// Pause of a waiting thread that has seen no move for `idle`.
void Progress::pause(Clock::duration idle) {
  if (idle < spin_) {
    relax();
  } else {
    sched_yield();
  }
}

void Progress::rest(std::uint32_t ticket, Clock::time_point idle_since) {
  const auto idle = Clock::now() - idle_since;
  if (wanted_.load() > 0 || idle < spin_ + kYield) {
    pause(idle);
  } else if (rings_()) {
    transport_.sleep(ticket, sleep_with_bell_);
  } else {
    transport_.sleep(ticket, std::clamp(std::chrono::duration_cast<microseconds>(idle / 64), kLeastSleep, kMostSleep));
  }
}

// Marks a thread that waits, and polls meanwhile. After its wait, another waiter or Progress's thread has to poll.
class Progress::Waiter {
 public:
  explicit Waiter(Progress& progress) : progress_(progress) { begin(); }
  Waiter(const Waiter&) = delete;
  ~Waiter() { end(); }
  // Calls a function that may take long (a signal handler). This thread does not poll meanwhile.
  void away(const std::function<void()>& function) {
    struct Back {
      Waiter& waiter;
      ~Back() { waiter.begin(); }
    };
    end();
    const Back back{*this};
    function();
  }

 private:
  void begin() { progress_.waiters_.fetch_add(1); }
  void end() {
    progress_.waiters_.fetch_sub(1);
    if (progress_.waiters_.load() > 0 || progress_.wakes()) progress_.notify();
  }

  Progress& progress_;
};

// Calls `interrupt` every kInterruptEvery, for the first time that long after construction.
class Progress::Interrupts {
 public:
  explicit Interrupts(const std::function<void()>& interrupt) : interrupt_(interrupt) {}
  bool due() const { return interrupt_ && Clock::now() - last_ > kInterruptEvery; }
  void call(Waiter& waiter) {
    waiter.away(interrupt_);
    last_ = Clock::now();
  }

 private:
  const std::function<void()>& interrupt_;
  Clock::time_point last_ = Clock::now();
};

std::unique_lock<std::mutex> Progress::try_turn() {
  constexpr int kTries = 50;
  std::unique_lock turn(turn_, std::try_to_lock);
  for (int tries = 0; !turn && tries < kTries; ++tries) {
    relax();
    static_cast<void>(turn.try_lock());
  }
  return turn;
}

bool Progress::expects_wait() {
  if (unwaited_.fetch_add(1) > 0) {
    waits_at_once_ = false;
    return false;
  }
  came_ = Clock::now();
  return waits_at_once_.load() && !sleeps_long_.load();
}

void Progress::note_wait() {
  if (const int came = unwaited_.exchange(0); came > 0)
    waits_at_once_ = came == 1 && Clock::now() - came_.load() < kAtOnce;
}

void Progress::wait(const std::function<bool()>& done, const std::function<void()>& interrupt) {
  if (done()) return;
  Waiter waiter(*this);
  Interrupts interrupts(interrupt);
  auto idle_since = Clock::now();
  while (!done()) {
    if (interrupts.due()) interrupts.call(waiter);
    std::unique_lock turn(turn_, std::defer_lock);
    if (wanted_.load() > 0 || !turn.try_lock()) {
      // Another waiter polls, or Progress's thread, which is about to notice this waiter and stop.
      give_way();
      continue;
    }
    poll_or_rest(done, idle_since);
  }
}

void Progress::poll_until(std::unique_lock<std::mutex>& turn, const std::function<bool()>& done, int looks,
                          const std::function<void()>& interrupt) {
  Waiter waiter(*this);
  Interrupts interrupts(interrupt);
  auto idle_since = Clock::now();
  while (!done()) {
    if (interrupts.due()) {
      turn.unlock();
      interrupts.call(waiter);
      take(turn);
      continue;
    }
    if (wanted_.load() > 0) {
      turn.unlock();
      give_way();
      take(turn);
    }
    poll_or_rest(done, idle_since);
    for (int look = 0; look < looks && !done(); ++look) pause(Clock::duration(0));
  }
}

// Called by a waiter that holds the turn.
void Progress::poll_or_rest(const std::function<bool()>& done, Clock::time_point& idle_since) {
  const std::uint32_t ticket = transport_.ticket();
  if (poll_()) {
    idle_since = Clock::now();
    if (waiters_.load() > 1) changed_.notify_all();
  } else if (!done()) {
    rest(ticket, idle_since);
  }
}

void Progress::give_way() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, microseconds(50));
}

// Waits for the turn. The thread that has it gives way.
void Progress::take(std::unique_lock<std::mutex>& turn) {
  if (turn.try_lock()) return;
  wanted_.fetch_add(1);
  transport_.ring(transport_.rank());  // the thread that has the turn may be asleep
  turn.lock();
  wanted_.fetch_sub(1);
}

void Progress::alone(const std::function<void()>& action) {
  std::unique_lock turn(turn_, std::defer_lock);
  take(turn);
  action();
}

void Progress::notify() {
  transport_.ring(transport_.rank());  // a polling thread may be asleep
  if (thread_sleeps_.load()) {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
}

void Progress::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  transport_.ring(transport_.rank());
  if (thread_.joinable()) thread_.join();
}

// True if the thread has to wake from its sleep.
bool Progress::wakes() const {
  const Work work = work_();
  return work == Work::kUnderWay || (work == Work::kRemains && sleeps_long_.load());
}

microseconds Progress::tick() {
  const Work work = work_();
  if (Clock::now() - came_.load() > kForget) waits_at_once_ = false;
  sleeps_long_ = (work == Work::kNone || (work == Work::kUnderWay && rings_())) && !waits_at_once_.load();
  return sleeps_long_ ? tick_ : kTickForRemains;
}

void Progress::run() {
  auto idle_since = Clock::now();
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      thread_sleeps_ = true;
      if (!stopping_ && (waiters_.load() > 0 || work_() != Work::kUnderWay)) {
        changed_.wait_for(lock, tick(), [&] { return stopping_ || (waiters_.load() == 0 && wakes()); });
      }
      thread_sleeps_ = false;
      if (stopping_) return;
    }
    if (waiters_.load() > 0) {
      idle_since = Clock::now();
      continue;
    }
    const std::uint32_t ticket = transport_.ticket();
    bool moved = false;
    {
      std::unique_lock turn(turn_, std::try_to_lock);
      if (turn) moved = poll_();
    }
    if (moved) {
      idle_since = Clock::now();
    } else if (work_() == Work::kUnderWay) {
      // The computing thread needs this core more than a spinning one does.
      rest(ticket, idle_since - spin_ - (rings_() ? kYield : microseconds(0)));
    }
  }
}

}  // namespace sordino
