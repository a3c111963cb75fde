// The data phase of one decision: what was asked for, who takes part, and how far it is.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/awake_clock.h"
#include "base/time.h"
#include "collectives/nccl_channel.h"
#include "collectives/participants.h"
#include "engine/announcement.h"
#include "engine/request.h"
#include "engine/staging_pool.h"

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

// What the members of a set on one node have found out of each other's devices, by trying.
struct SharedDevices {
  bool tried = false;
  bool mapped = false;                    // all map each other's memory
  std::shared_ptr<QueueBarrier> barrier;  // by which their queues meet; null where they cannot
};

// Communicators of NCCL, by the participants and the device of this rank.
using NcclChannels = std::map<std::pair<std::vector<int>, std::uint64_t>, std::shared_ptr<nccl::Channel>>;

struct Running {
  Decision decision;
  std::vector<Submission> submissions;  // in the order of decision.names
  std::unique_ptr<Participants> participants;
  Task task;
  Time since;
  AwakeTime awaited_since;
  bool warned = false;                                  // that it takes long
  std::vector<std::pair<Time, std::vector<int>>> late;  // ranks that were missed, and from when on; see Ledger
  Time looked{};                                        // when it was asked who is missed
  bool dormant = false;            // waits for another operation of this rank, which has a deadline of its own
  StagingPool* staging = nullptr;  // for operations on device memory
  std::unique_ptr<Compute> compute;
  NcclChannels* channels = nullptr;
  SharedDevices* devices = nullptr;
  const char* route = "";                  // which way that went (run_on_device.cc)
  Stream queue = 0;                        // that its work is on, if on a device
  std::shared_ptr<nccl::Channel> channel;  // that it went by, if NCCL's
  std::shared_ptr<QueueBarrier> barrier;   // by which its devices meet, if they do

  const Request& first() const { return submissions.front().request; }
};

// Builds the coroutine that moves the data of `running` and fills the handles' results.
Task run_operation(Running& running);
// That of operations on the host's memory, or whatever memory the participants' `compute` is for.
Task run_in_place(Running& running);
// That of operations on device memory (run_on_device.cc).
Task run_on_device(Running& running);
// Waits for what a request is to come after, and fails if that has failed.
Task come_after(Running& running, const Request& request);

}  // namespace sordino
