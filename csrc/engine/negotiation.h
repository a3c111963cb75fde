// Negotiation: makes ranks that submit in any order run the same operations in the same order.
//
// Every member of a process set announces each request to the set's first member, the coordinator. Once all members
// that have not joined have announced a name, the coordinator compares the announcements and decides. Either all
// members run the operation (alone, or fused with other small all-reduces), or it fails on all of them with an error
// that names the difference. Every member receives the decisions in the same order. Pure bookkeeping: no I/O, no clock.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/awake_clock.h"
#include "collectives/collective.h"
#include "engine/departure.h"

namespace sordino {

class Negotiation {
 public:
  Negotiation(std::vector<int> members, std::size_t fusion_bytes,
              std::shared_ptr<GivenIds> given = std::make_shared<GivenIds>())
      : members_(std::move(members)),
        joined_(members_.size(), false),
        departed_(members_.size()),
        fusion_bytes_(fusion_bytes),
        given_(std::move(given)) {}

  void announce(int member, Announcement announcement, AwakeTime now);
  // Notes that a member has shut down: requests that need it fail, both pending and later ones.
  void note_left(int member, Departure departure);
  // Returns the decisions that have become possible, in order.
  std::vector<Decision> decide();

  // For stall reports: a pending name, the time of its first announcement, and the world ranks it waits for.
  struct Waiting {
    std::string name;
    Opcode opcode;
    AwakeTime since;
    std::vector<int> missing;
    bool warned;
    std::vector<int> called;  // world ranks that have announced it, and wait
  };
  std::vector<Waiting> waiting() const;
  void mark_warned(const std::string& name) { pending_.at(name).warned = true; }

 private:
  struct Pending {
    std::vector<std::optional<Announcement>> said;  // by member index
    int count = 0;
    int last = -1;  // member that announced it last
    AwakeTime since;
    bool warned = false;
  };

  bool complete(const Pending& pending) const;
  bool needs_the_gone(const Pending& pending) const;
  Decision give_up(const std::string& name, const Pending& pending) const;
  static Abilities common_abilities(const Pending& pending);
  Decision judge(const std::string& name, const Pending& pending);
  std::string difference(const std::vector<int>& participants, const Pending& pending) const;
  void fuse(std::vector<Decision>& decisions, Decision next, const Pending& pending);

  std::vector<int> members_;
  std::vector<bool> joined_;
  std::vector<std::optional<Departure>> departed_;  // by member
  std::size_t fusion_bytes_;
  std::shared_ptr<GivenIds> given_;
  std::unordered_map<std::string, Pending> pending_;
  std::vector<std::string> to_check_;  // names that may be complete, in order
  // Properties of the operations fused in the last decision of this round. The next one is compared with them.
  struct Fusing {
    ReduceOp op;
    double prescale, postscale;
    std::size_t bytes;
    std::vector<std::uint64_t> devices;  // of the participants
  };
  std::optional<Fusing> fusing_;
};

}  // namespace sordino
