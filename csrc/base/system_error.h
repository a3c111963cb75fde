// Meaning of a failed system call, the same for mappings, memory files and watched processes.
#pragma once

#include <string>

namespace sordino {

enum class Failing {
  kAgain,  // a signal came in between; the same call may succeed
  kGone,   // the process, or the memory that it had, does not exist any more
  kOther   // a limit of this process or its machine, or the kernel refuses the call: it says nothing of a peer
};

// By errno.
Failing failing_of(int error);

// The kernel's text for the error, and for a limit its value and how to raise it.
std::string explained(int error);

}  // namespace sordino
