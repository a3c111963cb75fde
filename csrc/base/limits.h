// Limits of this process: memory and open files. The only reader of them; the launcher asks here, too
// (python/sordino/cli/room.py).
//
// Control groups limit memory on several levels: a container's group, the one of its job, and so on up. All are read,
// of version 1 (a hierarchy for memory, beneath /sys/fs/cgroup/memory) and of version 2 (one for all, beneath
// /sys/fs/cgroup). /proc/self/cgroup names the innermost. Without a namespace for groups a container sees its own at
// the top while /proc names its place on the host, so folders that are not there are passed over.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>

namespace sordino {

class Limits {
 public:
  // `root`: where /proc and /sys are looked for; tests have others.
  explicit Limits(std::filesystem::path root = "/") : root_(std::move(root)) {}

  // Bytes that the groups allow; nothing where none sets a limit.
  std::optional<std::size_t> memory() const;
  // Bytes that the kernel could still hand out: of the machine, and of each group. Cached files make room.
  std::size_t available_memory() const;

  struct Files {
    std::size_t allowed, at_most;  // at once (RLIMIT_NOFILE); that the user may raise it to
  };
  // The limits of this process; the root does not matter.
  static Files files();

 private:
  template <class Visit>
  void visit_groups(Visit&& visit) const;

  const std::filesystem::path root_;
};

}  // namespace sordino
