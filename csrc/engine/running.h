// The data phase of one decision: what was asked for, who takes part, and how far it is.
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

// What the members of a set on one node have found out of each other's devices, by trying.
struct SharedDevices {
  bool tried = false;
  bool mapped = false;                    // all map each other's memory
  std::shared_ptr<QueueBarrier> barrier;  // by which their queues meet; null where they cannot
};

// Communicators of NCCL, by the participants and the device of this rank.
using NcclChannels = std::map<std::pair<std::vector<int>, std::uint64_t>, std::shared_ptr<nccl::Channel>>;

struct Running : Operation {
  Task task;
  Time since;
  AwakeTime awaited_since;
  bool warned = false;                                  // that it takes long
  std::vector<std::pair<Time, std::vector<int>>> late;  // ranks that were missed, and from when on; see Ledger
  Time looked{};                                        // when it was asked who is missed
  StagingPool* staging = nullptr;                       // for operations on device memory
  std::unique_ptr<Compute> compute;
  NcclChannels* channels = nullptr;
  SharedDevices* devices = nullptr;
  const char* route = "";                  // which way that went (run_on_device.cc)
  std::shared_ptr<nccl::Channel> channel;  // that it went by, if NCCL's
  std::shared_ptr<QueueBarrier> barrier;   // by which its devices meet, if they do
};

// Builds the coroutine for an operation on device memory (run_on_device.cc).
Task run_on_device(Running& running);

}  // namespace sordino
