// ProcessWatch: notices the end of another process of this machine, as the kernel reports it.
#pragma once

#include <sys/types.h>

#include <string>

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
  bool has_descriptor() const { return pidfd_ >= 0; }

 private:
  bool looks_ended() const;

  pid_t pid_;
  int pidfd_ = -1;
  std::string begun_;  // start time as given by /proc; empty if unknown
  bool ended_ = false;
};

}  // namespace sordino::process
