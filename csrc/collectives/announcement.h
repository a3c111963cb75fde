// Announcement of a request by one member of a process set to the set's coordinator, and the coordinator's decision.
#pragma once

#include <string>
#include <vector>

#include "base/wire.h"
#include "collectives/abilities.h"
#include "collectives/request.h"

namespace sordino {

// Process sets of a member. It announces them with a set to be added, whose id and tags must differ from theirs.
struct KnownSets {
  int newest = 0;        // largest id that the member has ever had
  std::vector<int> ids;  // of its present sets
};

// One member's announcement of one request: its arguments, without pointers.
struct Announcement {
  std::string name;
  Opcode opcode;
  ReduceOp op;
  double prescale, postscale;
  int root;
  std::vector<DType> dtypes;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<std::int64_t> splits;
  SetChange set_change = {};
  KnownSets known_sets = {};
  std::uint64_t device = 0;  // identity of the device that has the tensors; 0 for the host
  Abilities abilities = 0;

  static Announcement of(const Request& request);
  static Announcement read(Reader& reader);
  void write(Writer& writer) const;
  std::size_t bytes() const;
};

enum class Verdict : std::uint8_t { kRun, kMismatch, kPeerLost };
inline constexpr Verdict kLastVerdict = Verdict::kPeerLost;

// Facts that no participant knows by itself, merged from all announcements.
struct Merged {
  // For operations with rows: the numbers of rows of all participants, in the order that `merge` defines.
  std::vector<std::int64_t> rows;
  int last_rank = -1;  // world rank that has joined last
  int set_id = 0;      // of the new process set
};

// The coordinator's decision on the next step of all members of a set.
struct Decision {
  std::vector<std::string> names;
  Verdict verdict = Verdict::kRun;
  std::string error;
  std::vector<int> lost;          // world ranks, with kPeerLost
  std::vector<int> participants;  // indices of the members that announced it (joined members did not)
  Merged merged;
  // For operations on device memory: abilities of all participants. kNccl only with kNcclShared, if two share a device.
  Abilities abilities = 0;
  int last = -1;          // world rank that announced it last; -1 where no rank did
  bool repeated = false;  // made by this rank, after all agreed in a turn

  // `members`: number of members of the set.
  static Decision read(Reader& reader, std::size_t members);
  void write(Writer& writer) const;
};

// The first difference between two announcements of the same name, such as "dtype: float32 against int64", or "".
std::string difference(const Announcement& a, const Announcement& b);

}  // namespace sordino
