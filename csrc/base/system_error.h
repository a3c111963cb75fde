// Classification of failed system calls, shared by mappings, memory files and watched processes.
#pragma once

#include <string>

namespace sordino {

enum class Failing {
  kAgain,  // a signal interrupted it; the same call may succeed
  kGone,   // the process, or its memory, no longer exists
  kOther   // a limit of this process or machine, or a refusal by the kernel: says nothing about a peer
};

// Classifies an errno value.
Failing failing_of(int error);

// Returns the system's text for an errno value. For a limit, also its value and how to raise it.
std::string explained(int error);

}  // namespace sordino
