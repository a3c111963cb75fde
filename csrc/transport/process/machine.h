// Identity of the machine that a process runs on.
#pragma once

#include <string>

namespace sordino::process {

// The machine since its boot, and the process namespace. Processes with equal values give process ids the same meaning.
// A part that the kernel does not provide is empty.
std::string machine();

}  // namespace sordino::process
