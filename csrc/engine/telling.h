// Helpers that put deadlines and losses into words.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/awake_clock.h"

namespace sordino {

inline std::string list(const std::vector<int>& ranks) {
  std::string out;
  for (std::size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
  return out;
}

inline std::string whole(double value) { return std::to_string(static_cast<long long>(value)); }

inline double seconds(AwakeTime from, AwakeTime to) { return std::chrono::duration<double>(to - from).count(); }

}  // namespace sordino
