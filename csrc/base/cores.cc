#include "base/cores.h"

#include <limits.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <thread>

namespace sordino {

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::string host_name() {
  char text[HOST_NAME_MAX + 1] = {};
  gethostname(text, sizeof(text) - 1);
  return text;
}

Cores Cores::of_this_process() {
  constexpr std::size_t kMostCores = 8192;  // the kernel refuses a mask that is too short for its cores
  Cores own;
  own.kernel = boot_id();
  if (own.kernel.empty()) own.kernel = host_name();
  cpu_set_t sets[kMostCores / CPU_SETSIZE] = {};
  const bool known = sched_getaffinity(0, sizeof(sets), sets) == 0;
  const std::size_t all = known ? kMostCores : std::thread::hardware_concurrency();
  for (std::size_t core = 0; core < all; ++core) {
    if (known && !CPU_ISSET_S(core, sizeof(sets), sets)) continue;
    own.mask.resize(core / 64 + 1);
    own.mask.back() |= std::uint64_t{1} << core % 64;
  }
  return own;
}

int Cores::count() const {
  int cores = 0;
  for (const std::uint64_t word : mask) cores += std::popcount(word);
  return cores;
}

double ranks_per_core(std::span<const Cores> cores, std::size_t me) {
  const Cores& own = cores[me];
  const auto shares_a_core = [&own](const Cores& other) {
    if (&other == &own) return true;
    if (other.kernel != own.kernel) return false;
    for (std::size_t word = 0; word < std::min(own.mask.size(), other.mask.size()); ++word) {
      if ((own.mask[word] & other.mask[word]) != 0) return true;
    }
    return false;
  };
  const auto ranks = std::count_if(cores.begin(), cores.end(), shares_a_core);
  return static_cast<double>(ranks) / std::max(own.count(), 1);
}

}  // namespace sordino
