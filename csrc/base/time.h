// Clock of records and traces. It never goes back, and all ranks of a node read the same clock. Deadlines use another
// clock (awake_clock.h).
#pragma once

#include <chrono>

namespace sordino {

using Time = std::chrono::steady_clock::time_point;

}  // namespace sordino
