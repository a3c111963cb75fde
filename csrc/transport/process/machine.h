// What a process can say of the machine that it is on, and what others make of it.
#pragma once

#include <string>

namespace sordino::process {

// The machine since it was started, and the process namespace: where two processes have the same, process numbers mean
// the same. Empty parts where the kernel does not tell.
std::string machine();
std::string host_name();

}  // namespace sordino::process
