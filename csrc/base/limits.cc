#include "base/limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace sordino {
namespace {

// File names, and names in memory.stat, of one version of control groups.
struct Version {
  const char *mount, *limit, *usage, *active, *inactive;
};
constexpr Version kFirst{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file",
                         "total_inactive_file"};
constexpr Version kSecond{"sys/fs/cgroup", "memory.max", "memory.current", "active_file", "inactive_file"};

// Returns nothing for "max" (no limit), or if there is no such file.
std::optional<std::size_t> number_in(const std::filesystem::path& file) {
  std::size_t number = 0;
  if (std::ifstream(file) >> number) return number;
  return std::nullopt;
}

bool names_memory(const std::string& controllers) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "memory") return true;
  }
  return false;
}

}  // namespace

// Calls visit(version, folder, limit) for each control group around this process that limits memory.
template <class Visit>
void Limits::visit_groups(Visit&& visit) const {
  std::ifstream groups(root_ / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !names_memory(controllers)) continue;
    const Version& version = controllers.empty() ? kSecond : kFirst;
    const std::filesystem::path mount = root_ / version.mount;
    std::filesystem::path inner = std::filesystem::path(line.substr(second + 1)).lexically_normal().relative_path();
    for (;; inner = inner.parent_path()) {
      const std::filesystem::path folder = mount / inner;
      if (const auto limit = number_in(folder / version.limit)) visit(version, folder, *limit);
      if (inner.empty()) break;
    }
  }
}

std::optional<std::size_t> Limits::memory() const {
  std::optional<std::size_t> least;
  visit_groups([&](const Version&, const std::filesystem::path&, std::size_t limit) {
    least = std::min(least.value_or(SIZE_MAX), limit);
  });
  return least;
}

Limits::Available Limits::available_memory() const {
  Available least{SIZE_MAX, "this machine (MemAvailable in /proc/meminfo)"};
  std::ifstream machine(root_ / "proc/meminfo");
  for (std::string word; machine >> word;) {
    std::size_t kibibytes = 0;
    if (word == "MemAvailable:" && machine >> kibibytes) least.bytes = kibibytes * 1024;
  }
  visit_groups([&](const Version& version, const std::filesystem::path& folder, std::size_t limit) {
    std::size_t used = number_in(folder / version.usage).value_or(0);
    std::ifstream statistics(folder / "memory.stat");
    std::string name;
    for (std::size_t value = 0; statistics >> name >> value;) {
      if (name == version.active || name == version.inactive) used -= std::min(used, value);
    }
    const std::size_t left = limit > used ? limit - used : 0;
    if (left >= least.bytes) return;
    least = {left, "the control group " + folder.string() + ", which uses " + std::to_string(used) + " of " +
                       std::to_string(limit) + " bytes, without cached files"};
  });
  return least;
}

Limits::Files Limits::files() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return {limit.rlim_cur, limit.rlim_max};
}

}  // namespace sordino
