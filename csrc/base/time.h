// Clock of records and traces. It never goes back, and is the same on all ranks of a node. Deadlines use awake_clock.h.
#pragma once

#include <chrono>

namespace sordino {

using Time = std::chrono::steady_clock::time_point;

}  // namespace sordino
