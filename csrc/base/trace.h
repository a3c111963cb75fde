// Timeline of operations in Chrome's trace format (chrome://tracing, Perfetto), with one lane per tensor. The event
// names are Horovod's. If it is off, it costs one relaxed load per operation.
//
// Events are buffered in this class and not in stdio: a forked child would write stdio's buffer again when it exits.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string>

namespace sordino {

class Trace {
 public:
  using Time = std::chrono::steady_clock::time_point;
  ~Trace() { stop(); }

  // Throws UsageError if the file cannot be written, or if a trace is already running.
  void start(const std::string& path, int rank, bool mark_cycles);
  // Ends the JSON and closes the file. Does nothing if no trace runs, or in a forked child.
  void stop();
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Continues the running trace, if any, of another world of this rank.
  void take_over(Trace& other);

  // Adds a box: `activity` on the lane of `tensor`, with its size in bytes.
  void span(const std::string& tensor, const std::string& activity, Time begin, Time end, std::size_t bytes);
  // Adds a mark across all lanes, if start() was called with `mark_cycles`.
  void mark(const std::string& text);

 private:
  double micros(Time time) const { return std::chrono::duration<double, std::micro>(time - start_).count(); }
  // The callers of these functions hold mutex_.
  int lane(const std::string& tensor);
  void write(const std::string& text);
  void flush();

  std::atomic<bool> on_{false};
  std::mutex mutex_;
  int file_ = -1;        // a descriptor
  std::string waiting_;  // text to be written
  pid_t process_ = 0;    // the one that called start()
  int rank_ = 0;
  bool mark_cycles_ = false;
  Time start_{};
  std::map<std::string, int> lanes_;
};

}  // namespace sordino
