// The data phase of one decision: its requests, its participants, and its progress.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/awake_clock.h"
#include "base/time.h"
#include "collectives/collective.h"
#include "collectives/nccl_channel.h"
#include "engine/staging_pool.h"

namespace sordino {

// Abilities of the devices of a set's members on one node, as a trial has shown (run_on_device.cc).
struct SharedDevices {
  bool tried = false;
  bool mapped = false;                    // every member maps the memory of all others
  std::shared_ptr<QueueBarrier> barrier;  // at which their queues meet; null if they cannot
};

// NCCL communicators, by participants and by device of this rank.
using NcclChannels = std::map<std::pair<std::vector<int>, std::uint64_t>, std::shared_ptr<nccl::Channel>>;

struct Running : Operation {
  Task task;
  Time since;
  AwakeTime awaited_since;
  bool warned = false;                                  // about its duration
  std::vector<std::pair<Time, std::vector<int>>> late;  // start of each wait, and its ranks; see Ledger
  Time looked{};                                        // last time that `late` was updated
  StagingPool* staging = nullptr;                       // for operations on device memory
  std::unique_ptr<Compute> compute;
  NcclChannels* channels = nullptr;
  SharedDevices* devices = nullptr;
  const char* route = "";                  // name of the route (run_on_device.cc); empty on the host
  std::shared_ptr<nccl::Channel> channel;  // the NCCL channel it used, if any
  std::shared_ptr<QueueBarrier> barrier;   // the barrier at which its devices meet, if any
};

// Builds the coroutine for an operation on device memory (run_on_device.cc).
Task run_on_device(Running& running);

}  // namespace sordino
