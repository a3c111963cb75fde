// A process set: some ranks of the world, with an order of operations of their own.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collectives/nccl_operations.h"
#include "collectives/negotiation.h"
#include "collectives/request.h"
#include "collectives/staging.h"
#include "collectives/team.h"

namespace sordino {

// A request between submit() and its end on this rank.
struct Submission {
  Request request;
  std::shared_ptr<Handle> handle;
  Time since;
  bool warned = false;  // that its coordinator says nothing
  bool begun = false;   // it has been decided
};

// Communicators of NCCL, by the participants and the device of this rank.
using NcclChannels = std::map<std::pair<std::vector<int>, std::uint64_t>, std::shared_ptr<nccl::Channel>>;

// The data phase of one decision.
struct Running {
  Decision decision;
  std::vector<Submission> submissions;  // in the order of decision.names
  std::unique_ptr<Team> team;           // null when this rank takes no part in moving data
  Task task;
  Time since;
  bool warned = false;         // that it takes long
  Staging* staging = nullptr;  // for operations on device memory
  std::unique_ptr<Compute> compute;
  NcclChannels* channels = nullptr;
  const char* route = "";                  // which way that went (run_on_device.cc)
  std::shared_ptr<nccl::Channel> channel;  // that it went by, if NCCL's
};

// Builds the coroutine that moves the data of `running` and fills the handles' results.
Task run_operation(Running& running);
// That of operations on the host's memory, or whatever memory the team's `compute` is for.
Task run_in_place(Running& running);
// That of operations on device memory (run_on_device.cc).
Task run_on_device(Running& running);

class ProcessSet {
 public:
  // `chunk`: bytes of a staging slot, 0 when the ranks of a node do not share memory. `patience`:
  // Team's.
  ProcessSet(int id, std::vector<int> ranks, Transport& transport, std::size_t chunk, int patience,
             std::size_t fusion_bytes);

  // This rank leaves the world: its desk stays for peers that have yet to map it.
  void leave_desk() {
    if (own_desk_) transport_.keep(std::move(own_desk_));
  }
  // Where this rank's desk is, for the node peers; segment 0 when there is none.
  Location desk_location() const;
  std::vector<int> node_peers() const;
  // A node peer has said where its desk is. TransportError if it is none, or has said so before.
  void meet(int rank, const Location& desk);
  // All desks that this rank will ever see are there.
  bool ready() const { return strangers_.empty(); }

  std::unique_ptr<Team> make_team(const std::vector<int>& participants, Traffic& traffic);
  void remember(const Team& team) {
    last_staged_ = team.last_staged;
    last_staged_desks_ = team.last_staged_desks;
    shares_devices_ = team.shares_devices;
  }

  int index_of(int rank) const {
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
  }
  int coordinator() const { return ranks.front(); }

  const int id;
  const std::vector<int> ranks;
  const int me;                            // index of this rank, -1 for non-members
  std::optional<Negotiation> negotiation;  // on the coordinator
  std::deque<Decision> decisions;          // not begun yet
  std::set<std::string> stalled;           // undecided names whose missing ranks the coordinator has reported
  std::optional<Running> running;
  NcclChannels channels;

 private:
  Transport& transport_;
  const std::size_t chunk_;
  const int patience_;
  std::shared_ptr<Segment> own_desk_;
  std::vector<Desk*> desks_;  // by member; null for members of other nodes
  std::set<int> strangers_;   // node peers that have not said where their desks are
  std::uint64_t sequence_ = 0;
  std::uint64_t last_staged_ = 0;
  std::vector<Desk*> last_staged_desks_;
  std::optional<bool> shares_devices_;
};

}  // namespace sordino
