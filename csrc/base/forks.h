// Distinguishes a process from its forked children, without the system call getpid().
#pragma once

#include <cstdint>

namespace sordino {

// Number of forks between the process that loaded this library and this one.
std::uint32_t forks();

}  // namespace sordino
