// The clock of records and traces: it never goes back, and node peers read the same. Deadlines have another one
// (awake_clock.h).
#pragma once

#include <chrono>

namespace sordino {

using Time = std::chrono::steady_clock::time_point;

}  // namespace sordino
