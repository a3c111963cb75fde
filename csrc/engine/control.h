// What ranks say to each other besides data: the kinds of control messages, each message's first byte.
#pragma once

#include <cstdint>
#include <string>

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
  kGaveUp
};
inline constexpr Message kLastMessage = Message::kGaveUp;
enum class Failure : std::uint8_t { kPeerLost, kTimeout, kOther };
inline constexpr Failure kLastFailure = Failure::kOther;

// What an operation under way is known by on its rank.
inline std::string key_of(int set, const std::string& name) { return std::to_string(set) + "/" + name; }

}  // namespace sordino
