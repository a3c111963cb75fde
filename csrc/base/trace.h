// Timeline of operations in Chrome's trace format (chrome://tracing, Perfetto), with one lane per tensor. The event
// names are Horovod's. While it is off, it costs one relaxed load per operation.
//
// Text waits in a buffer of this class, not of stdio, which a forked child would write a second time at its exit.
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
  // Ends the JSON and closes the file. No effect if no trace runs, and in a forked child.
  void stop();
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Continues the trace of another world of this rank, if one runs there.
  void take_over(Trace& other);

  // One box: `activity` on the lane of `tensor`, with its size.
  void span(const std::string& tensor, const std::string& activity, Time begin, Time end, std::size_t bytes);
  // A mark across all lanes, if start() asked for marks.
  void mark(const std::string& text);

 private:
  double micros(Time time) const { return std::chrono::duration<double, std::micro>(time - start_).count(); }
  // These need mutex_ held.
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
