// Limits of this process: memory and open files. Only this class reads them. The launcher uses it, too
// (python/sordino/launcher/capacity.py).
//
// Control groups limit memory on several levels: the group of a container, the group of its job, and so on. All levels
// are read, in version 1 (a separate hierarchy for memory, below /sys/fs/cgroup/memory) and in version 2 (one hierarchy
// for all resources, below /sys/fs/cgroup). /proc/self/cgroup names the innermost group. In a container without a
// cgroup namespace, this file names a path on the host, but the group is at the top of the mount. So missing folders
// are skipped.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>

namespace sordino {

class Limits {
 public:
  // `root`: the folder that holds proc and sys. Tests replace it.
  explicit Limits(std::filesystem::path root = "/") : root_(std::move(root)) {}

  // Smallest memory limit of the groups, in bytes. Empty if no group has a limit.
  std::optional<std::size_t> memory() const;
  struct Available {
    std::size_t bytes;
    std::string of;  // the machine or the control group that sets the limit, for messages
  };
  // Memory that can still be allocated: the minimum over the machine and all groups. Cached files count as free.
  Available available_memory() const;

  struct Files {
    std::size_t allowed, at_most;  // files open at once (RLIMIT_NOFILE); the user can raise it to at_most
  };
  // Limits of this process. Independent of `root`.
  static Files files();

 private:
  template <class Visit>
  void visit_groups(Visit&& visit) const;

  const std::filesystem::path root_;
};

}  // namespace sordino
