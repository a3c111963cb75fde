// Helpers that format ranks, numbers and deadlines for messages.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "base/awake_clock.h"

namespace sordino {

inline std::string list(const std::vector<int>& ranks) {
  std::string out;
  for (std::size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
  return out;
}

// "rank 3" or "ranks 0, 2".
inline std::string named(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + list(ranks);
}

inline std::string whole(double value) { return std::to_string(static_cast<long long>(value)); }

// "5" or "0.25".
inline std::string brief(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

inline double seconds(AwakeTime from, AwakeTime to) { return std::chrono::duration<double>(to - from).count(); }

// End of the error of an operation that has waited too long. `timeout_s`: the timeout of its process set in s; 0: none.
inline std::string beyond(double timeout_s) {
  if (timeout_s == 0) return ", more than SORDINO_TIMEOUT_S";
  return ", more than the timeout of its process set (" + brief(timeout_s) + " s)";
}

}  // namespace sordino
