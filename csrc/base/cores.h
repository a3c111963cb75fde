// Cores that a process may run on, and how many ranks share them. Containers of one machine have one kernel, so they
// may share its cores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace sordino {

// Differs between any two boots of any machines. Empty if the kernel does not provide it.
std::string boot_id();
std::string host_name();

struct Cores {
  std::string kernel;               // equal for processes with the same kernel
  std::vector<std::uint64_t> mask;  // bit c of word w: core 64 w + c

  static Cores of_this_process();
  int count() const;
};

// Number of ranks that may run on the cores of rank `me`, itself included, over the number of these cores.
double ranks_per_core(std::span<const Cores> cores, std::size_t me);

}  // namespace sordino
