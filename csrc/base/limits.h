// Limits of this process: memory and open files. Only this class reads them; the launcher uses it, too
// (python/sordino/launcher/capacity.py).
//
// Control groups limit memory on several levels: the group of a container, the one of its job, and so on up. All levels
// are read, in version 1 (a separate hierarchy for memory, below /sys/fs/cgroup/memory) and in version 2 (one for all,
// below /sys/fs/cgroup). /proc/self/cgroup names the innermost group. In a container without a cgroup namespace, its
// own group is at the top of the mount, but /proc names its path on the host. So folders that do not exist are skipped.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>

namespace sordino {

class Limits {
 public:
  // `root`: folder of /proc and /sys; replaced by tests.
  explicit Limits(std::filesystem::path root = "/") : root_(std::move(root)) {}

  // Bytes that the groups allow. Empty if no group sets a limit.
  std::optional<std::size_t> memory() const;
  struct Available {
    std::size_t bytes;
    std::string of;  // the machine or the control group that sets the limit, for messages
  };
  // Memory that the kernel can still give: the minimum over the machine and all groups. Cached files count as free.
  Available available_memory() const;

  struct Files {
    std::size_t allowed, at_most;  // allowed at once (RLIMIT_NOFILE); the user may raise it to at_most
  };
  // The limits of this process, whatever the root.
  static Files files();

 private:
  template <class Visit>
  void visit_groups(Visit&& visit) const;

  const std::filesystem::path root_;
};

}  // namespace sordino
