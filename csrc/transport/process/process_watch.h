// The end of another process of this machine, as the kernel tells it.
#pragma once

#include <sys/types.h>

#include <string>

namespace sordino::process {

// Watches by a pidfd. Where the kernel gives none (a limit on open files, a sandbox, a kernel before 5.3), it looks at
// /proc and asks by signal 0, which is as certain and costs some microseconds a look.
class ProcessWatch {
 public:
  explicit ProcessWatch(pid_t pid);
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ~ProcessWatch();

  // Also where it had ended before it was watched. Once true it stays so.
  bool ended();
  bool has_descriptor() const { return pidfd_ >= 0; }

 private:
  bool looks_ended() const;

  pid_t pid_;
  int pidfd_ = -1;
  std::string begun_;  // when it was started, as /proc has it; empty where that does not tell
  bool ended_ = false;
};

}  // namespace sordino::process
