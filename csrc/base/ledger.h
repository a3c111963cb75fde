// Ledger: the data of a run record, except the bytes sent to each rank (transport/traffic.h). It records how long
// operations were in flight, and when an operation waited for which rank. Off, it costs a relaxed load per event.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/time.h"

namespace sordino {

class Ledger {
 public:
  enum class What : std::uint8_t {
    kWait,     // a call of this rank waited
    kMeet,     // an operation of this rank waited for other ranks to begin theirs; `peer` was the last
    kMove,     // its data were in flight; `peer` was late (-1: no rank)
    kPull,     // a snapshot of `peer` was fetched
    kAverage,  // parameters were averaged with those of `peer`
  };
  struct Span {
    What what;
    Time begin, end;
    int peer;
    std::uint64_t bytes;
    std::string name;
  };
  struct Taken {
    double seconds = 0;         // with work in flight, since the beginning; overlapping work may count twice
    std::vector<Span> spans;    // since the last take()
    std::uint64_t dropped = 0;  // number of spans since then that exceeded the limit kMost
  };

  void open(bool opened) {
    std::lock_guard lock(mutex_);
    is_busy_ = false;
    open_ = opened;
    if (!opened) spans_kept_ = false;
  }
  bool open_now() const { return open_.load(std::memory_order_relaxed); }
  void keep_spans(bool keep) { spans_kept_ = keep; }
  bool keeps_spans() const { return spans_kept_.load(std::memory_order_relaxed); }

  // busy(): the first operation in flight begins. idle(): the last one ends. Called in turn, from any thread.
  void busy(Time now) {
    std::lock_guard lock(mutex_);
    since_ = now;
    is_busy_ = true;
  }
  void idle(Time now) {
    std::lock_guard lock(mutex_);
    if (std::exchange(is_busy_, false)) add(now - since_);
  }
  // Adds the time of work that busy() and idle() do not cover.
  void beside(Time begin, Time end) {
    std::lock_guard lock(mutex_);
    add(end - begin);
  }
  void note(What what, Time begin, Time end, int peer, std::uint64_t bytes, const std::string& name) {
    std::lock_guard lock(mutex_);
    if (spans_.size() < kMost) {
      spans_.push_back({what, begin, end, peer, bytes, name});
    } else {
      ++dropped_;
    }
  }
  // A service has finished a transfer.
  void done_beside(What what, Time begin, Time end, int peer, std::uint64_t bytes) {
    if (open_now()) beside(begin, end);
    if (keeps_spans()) note(what, begin, end, peer, bytes, "");
  }
  Taken take(Time now) {
    std::lock_guard lock(mutex_);
    if (is_busy_) {
      add(now - since_);
      since_ = now;
    }
    return {static_cast<double>(nanoseconds_) * 1e-9, std::exchange(spans_, {}), std::exchange(dropped_, 0)};
  }

 private:
  static constexpr std::size_t kMost = 1 << 14;

  void add(std::chrono::nanoseconds time) { nanoseconds_ += time.count(); }

  std::atomic<bool> open_{false}, spans_kept_{false};
  std::mutex mutex_;
  bool is_busy_ = false;
  Time since_{};
  std::int64_t nanoseconds_ = 0;
  std::vector<Span> spans_;
  std::uint64_t dropped_ = 0;
};

}  // namespace sordino
