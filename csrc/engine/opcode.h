// Which operations there are. Python names them by the same numbers, and ranks tell each other by them.
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

inline const char* name_of(Opcode opcode) {
  constexpr const char* names[] = {"allreduce", "broadcast", "allgather",       "alltoall",           "reducescatter",
                                   "barrier",   "join",      "add_process_set", "remove_process_set", "exchange"};
  return names[static_cast<int>(opcode)];
}

// Whether ranks run it in the order of their calls, with nothing to negotiate: a set has either such operations or
// others, never both.
inline bool is_direct(Opcode opcode) { return opcode == Opcode::kExchange; }

}  // namespace sordino
