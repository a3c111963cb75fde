// What the members of a process set tell its coordinator of their requests, and what it tells them to do.
#pragma once

#include <string>
#include <vector>

#include "base/wire.h"
#include "engine/abilities.h"
#include "engine/request.h"

namespace sordino {

// What one member says of one request. Pointers stay at home.
struct Announcement {
  std::string name;
  Opcode opcode;
  ReduceOp op;
  double prescale, postscale;
  int root;  // add set: the newest id that the member knows
  std::vector<DType> dtypes;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<std::int64_t> splits;
  std::vector<int> sets = {};  // add set: the ids that the member has
  std::uint64_t device = 0;    // identity of the device whose memory it is in; 0 for the host's
  Abilities abilities = 0;

  static Announcement of(const Request& request);
  static Announcement read(Reader& reader);
  void write(Writer& writer) const;
  std::size_t bytes() const;
};

enum class Verdict : std::uint8_t { kRun, kMismatch, kPeerLost };
inline constexpr Verdict kLastVerdict = Verdict::kPeerLost;

// What every member of a set does next.
struct Decision {
  std::vector<std::string> names;
  Verdict verdict = Verdict::kRun;
  std::string error;
  std::vector<int> lost;          // world ranks, with kPeerLost
  std::vector<int> participants;  // member indices that announced it (joined members did not)
  // For each tensor and participant its first extent (allgather); the splits of all participants in rows
  // (alltoall); the last rank (join); the new id (add set).
  std::vector<std::int64_t> numbers;
  // Of operations on device memory: what all participants can do with it. NCCL they can use if no two share a device.
  Abilities abilities = 0;
  int last = -1;  // world rank that announced it last; -1 where nobody did

  static Decision read(Reader& reader);
  void write(Writer& writer) const;
};

// What differs between two announcements of the same name, or "".
std::string difference(const Announcement& a, const Announcement& b);

}  // namespace sordino
