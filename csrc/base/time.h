// The one clock of the core: it never goes back, and node peers read the same.
#pragma once

#include <chrono>

namespace sordino {

using Time = std::chrono::steady_clock::time_point;

}  // namespace sordino
