// Codes of operations. Python names them by the same numbers, and ranks tell each other by them.
#pragma once

#include <cstdint>

namespace sordino {

enum class Opcode : std::uint8_t {
  kAllreduce,
  kBroadcast,
  kAllgather,
  kAlltoall,
  kReducescatter,
  kBarrier,
  kJoin,
  kAddSet,
  kRemoveSet,
  kExchange,
};
inline constexpr Opcode kLastOpcode = Opcode::kExchange;

}  // namespace sordino
