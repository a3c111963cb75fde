// Notices the end of other processes of this machine, as the kernel reports it: ProcessWatch of one, ProcessWatches of
// several.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace sordino::process {

// Uses a pidfd. If the kernel gives none (limit on open files, sandbox, kernel before 5.3), it reads /proc and sends
// signal 0, which is as certain and costs a few microseconds per check.
class ProcessWatch {
 public:
  explicit ProcessWatch(pid_t pid);
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ~ProcessWatch();

  // Also true if it had ended before it was watched. Once true, it stays true.
  bool ended();
  // -1 if the kernel gives none.
  int descriptor() const { return pidfd_; }

 private:
  bool looks_ended() const;

  pid_t pid_;
  int pidfd_ = -1;
  std::string begun_;  // start time as given by /proc; empty if unknown
  bool ended_ = false;
};

// One call of the kernel checks all processes that have a descriptor. So ranks may check often, however many they are.
class ProcessWatches {
 public:
  void add(int key, ProcessWatch watch) { watches_.emplace_back(key, std::move(watch)); }
  // Returns the keys of the processes whose end has been noticed since the last call.
  std::vector<int> take_ended();

 private:
  std::vector<std::pair<int, ProcessWatch>> watches_;
};

}  // namespace sordino::process
