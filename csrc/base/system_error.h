// What a failed call of the kernel means, wherever it was made: for a mapping, a memory file, a watched process.
#pragma once

#include <string>

namespace sordino {

enum class Failing {
  kAgain,    // a signal came in between; the same call may succeed
  kGone,     // what was asked for is not there any more: a process, or memory that it had
  kLimit,    // this process, or its machine, has no more of something
  kRefused,  // the kernel does not know the call, or does not allow it
  kOther
};

// By errno.
Failing failing_of(int error);

// What happened in the kernel's words, and for a limit its value and how to raise it.
std::string explained(int error);

}  // namespace sordino
