// Scheduler of one rank: the order of its operations, and all that advances them.
//
//   submit     any thread       checks the request and queues it
//   enter      polling thread   repeats it without a negotiation, if all members do (scheduler_one_shot.cc); else:
//   announce   polling thread   announces it to the set's coordinator (negotiation.h)
//   decide     coordinator      once all members have announced a name: sends a decision to all members
//   receive    other members    queue the decision; all members of a set have its decisions in the same order
//   advance    all members      begin a set's next decision (execute), and resume its data phase until it is over
//   finish     all members      complete the handle
//
// Exchanges are not negotiated: announce() itself queues a decision, so a rank starts them in the order of its calls.
// Each process set runs one operation at a time.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/config.h"
#include "engine/common.h"
#include "engine/device_in_flight.h"
#include "engine/device_routes.h"
#include "engine/process_set.h"

namespace sordino {

class Scheduler {
 public:
  // `patience`: how many times a task re-reads a peer's counter (Participants). The constructor makes process set 0,
  // which has all ranks.
  Scheduler(Common& common, const Config& config, int patience);

  // ---- may be called from any thread

  // Throws UsageError for errors that this rank can detect alone (an unknown set, a rank that is not in it, a name in
  // flight). The handle reports errors that only a comparison of the ranks shows.
  std::shared_ptr<Handle> submit(Request request);
  // Members of a process set in order. Throws UsageError if there is no such set.
  std::vector<int> members(int set) const;
  std::vector<int> set_ids() const;
  std::vector<std::string> names_in_flight() const;
  // Number of operations on device memory, by route.
  std::map<std::string, std::uint64_t> routes() const;
  Abilities abilities(const Device& device) const { return device_routes_.open_to(device); }
  bool busy() const { return in_flight_.load() > 0; }
  // True while operations on device memory are in flight. Their progress rings no doorbell (transport/doorbell.h).
  bool on_devices() const { return on_devices_.load() > 0; }
  // True while outgoing messages are queued that other ranks may be waiting for.
  bool posting() const { return posting_.load(); }
  // True while other ranks wait in a turn that this rank has not entered and not declined yet.
  bool awaited() const { return awaited_.load(); }

  // ---- called by the polling thread only; the first three return whether anything moved

  // Announces the requests submitted since the last call to the coordinators of their sets.
  bool announce();
  // Makes the decisions that have become possible on sets that this rank coordinates, and sends them to the members.
  bool decide();
  // Advances running operations, and begins the next ones.
  bool advance();
  // Handles a message of another rank's scheduler. Throws TransportError if the message is invalid.
  void receive(int from, std::span<const std::byte> bytes);
  // Notes that a rank has left: operations that wait for it fail.
  void note_left(int rank);

  // Turns, in which ranks repeat operations without a negotiation (collectives/one_shot.h; scheduler_one_shot.cc).
  //
  // Returns what this rank knows of an operation; null if it knows nothing, or if turns are not used.
  std::shared_ptr<const Repeat> find(int set, std::string_view name, const Signature& what);
  // For a thread that waits in its call: enters an operation that turns carry. Null if it has to be submitted instead.
  std::shared_ptr<ProcessSet> enter_call(int set, const std::shared_ptr<const Repeat>& repeat, const std::byte* input,
                                         const std::byte* output);
  // Collects its result once the turn is over.
  enum class Collected {
    kNothing,  // the operation has to be submitted after all
    kHalf,     // this rank has entered the operation's second turn
    kAll,
  };
  Collected collect(ProcessSet& set, const std::byte* input, std::byte* output);
  // Whether this rank has entered a turn of an operation in two turns. After a loss, the second one is never over. Any
  // thread may ask.
  bool in_two_turns() const { return in_two_turns_.load() > 0; }
  // Drops an input that this rank has published, because the interrupted caller frees it. The world fails after this.
  void give_up_entered(ProcessSet& set);
  // Ends the turns that submissions have entered and that are over. True if there were any.
  bool end_turns();
  // For a rank that leaves: takes back its submissions that have entered a turn, unless others have counted them.
  void withdraw();
  // Declines the turns that other ranks have entered, if this rank waits for something else, or has let them wait for
  // too long. True if there were any.
  bool decline(Time now);
  // Moves one-shot messages between nodes. True if anything moved.
  bool relay(Time now);

  // Name of the operation of a handle; empty for a promise, which has no operation.
  std::string operation_of(const Handle& handle) const;
  // True if all decided operations have ended, and all turns that submissions have entered.
  bool settled() const;

  // ---- for the failure detector and the end of a world, on the polling thread

  const std::map<int, std::shared_ptr<ProcessSet>>& sets() const { return sets_; }
  DeviceInFlight& device_in_flight() { return device_in_flight_; }
  // Calls visit(submission, set) for each announced submission that has not ended. No thread can submit meanwhile.
  template <class Visit>
  void visit_announced(Visit&& visit) {
    std::lock_guard lock(mutex_);
    for (auto& [key, submission] : outstanding_) {
      if (submission.handle) visit(submission, *sets_.at(submission.request.set));
    }
  }
  // Ends a submission; `error` is null if all went well.
  void finish(Submission& submission, std::exception_ptr error);
  // Gives up the operation that runs on a set, and only that one.
  void give_up(ProcessSet& set, const std::exception_ptr& error);
  // Gives up the operation because of lost ranks. Tells the other participants, which may be waiting only for this
  // rank's part.
  void give_up(ProcessSet& set, const PeerLost& error);
  // Fails all submissions. `broken`: also gives up the work that is on devices.
  void end(const std::exception_ptr& failure, bool broken);
  // Ends the device work that waits for peers: NCCL's operations, and barriers of queues.
  void abort_devices();
  // True if the queues of all barriers, whose kernels write to memory of peers, are empty. Call it when no operation
  // runs.
  bool devices_idle();
  // Closes NCCL's communicators. A collective step: all ranks close them together.
  void close_nccl();

  // ---- when the world ends

  // Leaves this rank's shared blocks in place for peers that have yet to map them.
  void leave_blocks();
  // Leaks the operations that were given up, because MPI may still write to the memory of their transfers.
  void keep_given_up();

 private:
  ProcessSet& add_set(int id, std::vector<int> ranks);
  void remove_set(int id);
  void release_blocks();
  bool is_free(int id) const;
  void require_idle(int set) const;  // with mutex_ held
  bool enter_submission(ProcessSet& set, const Submission& submission);
  void enter_turn(ProcessSet& set, std::shared_ptr<const Repeat> repeat, std::string name, const std::byte* input,
                  const std::byte* output);
  [[noreturn]] void throw_lost(const std::string& operation, const MemoryGone& error) const;
  void end_turn(ProcessSet& set);
  bool close_turn(ProcessSet& set);
  bool deliver(ProcessSet& set, ProcessSet::InTurn&& turn, const std::byte* input, std::byte* output);
  void count_repeat(ProcessSet& set, const Repeat& repeat);
  Announcement announcement_of(const Request& request) const;
  void announce(ProcessSet& set, Announcement announcement);
  bool has_submitted(const ProcessSet& set, std::string_view name) const;
  void note_announced(ProcessSet& set, Submission& submission);
  bool has_announced(const ProcessSet& set, std::string_view name) const;
  bool must_decline(ProcessSet& set, const std::vector<OneShot::Number>& awaited, Time now) const;
  bool advance(ProcessSet& set);
  bool resume(Running& running);
  void execute(ProcessSet& set, Decision decision);
  void hear_of_given_up(ProcessSet& set, std::uint64_t sequence, const PeerLost& error);
  void refuse_decided();
  void fail(std::vector<Submission>& submissions, const PeerLost& error);
  void check(const ProcessSet& set, const Decision& decision, const std::vector<Submission>& submissions) const;
  void refuse(const Decision& decision, std::vector<Submission>& submissions);
  std::vector<Submission> take_decided(ProcessSet& set, const Decision& decision);
  void trace_negotiated(const std::vector<Submission>& submissions, Time now);
  void trace_run(const Running& running);
  void look_for_late(Running& running);
  void note_run(const Running& running);
  void tell_left(ProcessSet& set, int rank);

  Common& common_;
  const SetOptions set_options_;
  const bool repeats_submissions_;  // false where ranks survive losses, which must agree on the end of each operation
  const DeviceRoutes device_routes_;

  mutable std::mutex mutex_;  // guards the next four members, shared by the polling thread and others, and removing_
  std::deque<Submission> submitted_;
  std::unordered_map<std::string, Submission> outstanding_;  // by set and name; no handle until announce()
  std::map<int, std::shared_ptr<ProcessSet>> sets_;
  std::map<std::string, std::uint64_t> routes_;

  std::atomic<bool> submitted_any_{false};  // spares announce() the lock
  std::atomic<int> in_flight_{0}, on_devices_{0}, in_two_turns_{0};
  std::atomic<bool> posting_{false}, awaited_{false};

  // Used by the polling thread only, except removing_.
  struct Early {
    int from;
    Bytes message;
  };
  std::vector<Early> early_;  // messages about sets that this rank has not made yet
  std::set<int> made_;        // ids of all sets that this rank has made, including removed ones
  std::vector<RemovedSet> removed_;
  std::map<int, std::set<int>> released_;  // by set id: node peers that no longer use this rank's block
  std::vector<Running> given_up_;          // operations whose transfers may still be under way
  DeviceInFlight device_in_flight_;
  // Process sets whose removal this rank has submitted. No operation starts on them, so that none is under way on any
  // rank when the first rank removes the set.
  std::set<int> removing_;
  std::vector<Submission> removals_;  // of process sets; done at the end of the current advance()
  StagingPool staging_;               // declared after the sets, so destroyed first: its memory is used on their queues
};

}  // namespace sordino
