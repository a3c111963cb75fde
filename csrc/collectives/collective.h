// The description of one operation: everything that the engine knows of it. A new operation is a file in this folder,
// which defines its Collective, a line of the table in collective.cc, and a name in the bindings.
//
//   announce   each member sends its arguments to the coordinator          Announcement
//   compare    the coordinator refuses announcements that differ           difference(), Collective::complaint
//   merge      and gathers the facts that no participant knows by itself   Collective::merge
//   check      each participant refuses a decision that cannot be right    Collective::fits
//   run        and moves its data                                          Collective::run
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/awake_clock.h"
#include "base/time.h"
#include "collectives/announcement.h"
#include "collectives/participants.h"
#include "progress/task.h"

namespace sordino {

// A request between submit() and its end on this rank.
struct Submission {
  Request request;
  std::shared_ptr<Handle> handle;
  Time since;
  AwakeTime awaited_since;
  bool warned = false;  // that its coordinator says nothing
  bool begun = false;   // it has been decided
};

// One decision that runs on this rank.
struct Operation {
  Decision decision;
  std::vector<Submission> submissions;  // in the order of decision.names
  std::unique_ptr<Participants> participants;
  Stream queue = 0;      // of the device that it computes on, if on one
  bool dormant = false;  // it waits for another operation of this rank, which has a deadline of its own

  const Request& first() const { return submissions.front().request; }
};

// Ids of process sets that a rank has given as a coordinator: members may not have made them yet.
struct GivenIds {
  int newest = 0;
};

// The announcements of all participants, which do not differ.
struct Announced {
  std::vector<const Announcement*> all;  // in the order of the participants
  int last_rank;                         // world rank that announced it last
  GivenIds& given;
};

// Effect of an operation on the process set that it runs on, or on the sets of the world.
enum class Effect : std::uint8_t {
  kNone,
  kJoins,  // the member stands aside until all members do
  kAddsSet,
  kRemovesSet,
};

struct Collective {
  const char* name;  // in messages and traces
  Effect effect = Effect::kNone;
  bool negotiated = true;  // false: ranks run it in the order of their calls, on a set that has no other operations
  bool rows_may_differ = false;    // members may differ in the first extent of their tensors
  bool zeros_stand_in = false;     // members that have joined contribute zeros; without this, it needs all members
  bool only_root_gives = false;    // the input of other ranks is not read
  bool reduces = false;            // it folds values, which NCCL can do for some types and reductions only
  bool maps_devices = false;       // it works on device memory that all ranks of a node map
  bool small_ones_repeat = false;  // small ones are fused, and need no negotiation when they come again

  // The reason why a member cannot take part, after "rank 3 ", or "". Null: every member can.
  std::string (*complaint)(const Announcement& said, std::size_t members) = nullptr;
  // Null: there is nothing to merge.
  void (*merge)(const Announced& announced, Merged& merged) = nullptr;
  // Whether the merged facts fit this rank's request; it is participant `me` of `parts`. Null: they do.
  bool (*fits)(const Request& request, const Merged& merged, std::size_t parts, std::size_t me) = nullptr;
  // Move the data, and fill the handles' results.
  Task (*run)(Operation& operation);

  bool changes_sets() const { return effect == Effect::kAddsSet || effect == Effect::kRemovesSet; }
};

namespace collectives {
extern const Collective kAllreduce, kBroadcast, kAllgather, kAlltoall, kReducescatter, kBarrier, kJoin, kAddSet,
    kRemoveSet, kExchange;
}
const Collective& collective(Opcode opcode);

// Allocate memory for a result, where the operation computes, and add it to the handle's results.
Result& new_result(Handle& handle, const Operation& operation, std::vector<std::int64_t> shape, std::size_t bytes);

// Whether tensors of so many rows are small enough for the sum of their bytes to be a number.
bool rows_fit(const Tensor& tensor, std::span<const std::int64_t> rows);

// Wait for the operation that a request comes after, and fail if that has failed.
Task come_after(Operation& operation, const Request& request);

}  // namespace sordino
