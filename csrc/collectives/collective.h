// Description of one operation: all that the engine knows about it. To add an operation: docs/design.md, Where to add
// things.
//
//   announce   each member sends its arguments to the coordinator             Announcement
//   compare    the coordinator refuses announcements that differ              difference(), Collective::complaint
//   merge      the coordinator merges facts that no participant has alone     Collective::merge
//   check      each participant refuses a decision that cannot be right       Collective::fits
//   run        each participant moves its data                                Collective::run
//   repeat     operations that all members have done before skip announce     Collective::recipe, Collective::valid
//              to merge; small ones skip run, too (one_shot.h)
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/awake_clock.h"
#include "base/time.h"
#include "collectives/announcement.h"
#include "collectives/participants.h"
#include "collectives/repeat.h"
#include "progress/task.h"

namespace sordino {

// A request from submit() until it completes on this rank.
struct Submission {
  Request request;
  std::shared_ptr<Handle> handle;
  Time since;
  AwakeTime awaited_since;
  bool warned = false;  // about a coordinator that does not answer
  bool begun = false;   // the coordinator has decided it
  bool announced = false;
};

// One decision that runs on this rank.
struct Operation {
  Decision decision;
  std::vector<Submission> submissions;  // in the order of decision.names
  std::unique_ptr<Participants> participants;
  OwnedQueue queue;      // queue of the device that it computes on; null before it has one, and on the host
  bool dormant = false;  // it waits for another operation of this rank, which has a deadline of its own

  const Request& first() const { return submissions.front().request; }
};

// Ids of process sets that this rank has assigned as a coordinator. Members may not have made those sets yet.
struct GivenIds {
  int newest = 0;
};

// The announcements of all participants, which have been found not to differ.
struct Announced {
  std::vector<const Announcement*> all;  // in the order of the participants
  int last_rank;                         // world rank that announced it last
  GivenIds& given;
};

// Effect of an operation on the process set that it runs on, or on the sets of the world.
enum class Effect : std::uint8_t {
  kNone,
  kJoins,  // the member takes no part until all members have joined
  kAddsSet,
  kRemovesSet,
};

struct Collective {
  const char* name;  // in messages and traces
  Effect effect = Effect::kNone;
  bool negotiated = true;  // false: ranks run it in the order of their calls, on a set that has no other operations
  bool rows_may_differ = false;  // members may differ in the first extent of their tensors
  bool zeros_stand_in = false;   // members that have joined contribute zeros; if false, all members must take part
  bool only_root_gives = false;  // the input of other ranks is not read
  bool reduces = false;          // it folds values, which NCCL supports for some types and reductions only
  bool maps_devices = false;     // it works on device memory that all ranks of a node map
  bool fuses = false;            // small ones that are ready together run as one
  bool repeats = false;          // members that have done it before may agree on it in a turn (one_shot.h)

  // Returns why a member cannot take part, as the text after "rank 3 ", or "" if it can. Null: every member can.
  // Announcements come from other processes: their numbers of tensors have not been checked.
  std::string (*complaint)(const Announcement& said, std::size_t members) = nullptr;
  // Adds the facts of all announcements to `merged`. Null: no facts to merge.
  void (*merge)(const Announced& announced, Merged& merged) = nullptr;
  // Whether the merged facts fit this rank's request, as participant `me` of `parts`. Null: they always fit.
  bool (*fits)(const Request& request, const Merged& merged, std::size_t parts, std::size_t me) = nullptr;
  // Returns how member `me` of the set with these ranks gets its result from the published inputs. It is called for
  // requests of at most one tensor. Null: the operation never repeats in one shot.
  Recipe (*recipe)(const Request& request, const Merged& merged, const std::vector<int>& ranks,
                   std::size_t me) = nullptr;
  // Whether the set with these ranks can repeat the operation with this signature. Null: with any.
  bool (*valid)(const Signature& what, std::span<const int> ranks) = nullptr;
  // Moves the data, and fills the results of the handles.
  Task (*run)(Operation& operation);

  bool changes_sets() const { return effect == Effect::kAddsSet || effect == Effect::kRemovesSet; }
};

namespace collectives {
extern const Collective kAllreduce, kBroadcast, kAllgather, kAlltoall, kReducescatter, kBarrier, kJoin, kAddSet,
    kRemoveSet, kExchange;
}
const Collective& collective(Opcode opcode);

// Allocates a result in the memory that the operation computes in, and adds it to the handle's results. Throws
// TransportError if there is no room.
Result& new_result(Handle& handle, const Operation& operation, std::vector<std::int64_t> shape, std::size_t bytes);

Result host_result(std::vector<std::int64_t> shape, std::size_t bytes);

// Memory for the result of a tensor: its output if that has the right size, else a new result.
std::byte* result_memory(Handle& handle, const Operation& operation, const Tensor& tensor,
                         std::vector<std::int64_t> shape, std::size_t bytes);

// Whether these numbers of rows of the tensor take at most 2^62 bytes in total, so that their sum cannot overflow.
bool rows_fit(const Tensor& tensor, std::span<const std::int64_t> rows);

// The `run` of operations that are over once all members have agreed.
Task move_nothing(Operation& operation);

// Waits for the operation that `request.after` names, if any. If that operation failed, throws its error.
Task come_after(Operation& operation, const Request& request);

}  // namespace sordino
