// Codes of operations. Python and the messages between ranks use the same numbers.
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
