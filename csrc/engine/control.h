// Kinds of control messages between ranks: the first byte of each message.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/wire.h"

namespace sordino {

enum class Message : std::uint8_t {
  kAnnounce,
  kDecision,
  kStalled,
  kSharedBlock,
  kFreed,
  kBye,
  kFailed,
  kService,
  kClosed,
  kOneShot,
  kGaveUp,
  kReleased,
  kMessage
};
inline constexpr Message kLastMessage = Message::kMessage;
enum class Failure : std::uint8_t { kPeerLost, kTimeout, kOther };
inline constexpr Failure kLastFailure = Failure::kOther;

// Message with which this rank leaves. `cause`, `lost`: the error that makes it leave, and the ranks that the error
// names as lost; empty without an error.
inline Bytes goodbye(const std::string& cause = "", const std::vector<int>& lost = {}) {
  return Writer().put(Message::kBye).put(cause).put(lost).take();
}

// Key of an operation in flight on its rank.
inline std::string key_of(int set, const std::string& name) { return std::to_string(set) + "/" + name; }

}  // namespace sordino
