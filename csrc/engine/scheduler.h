// What a rank does and in which order: requests are announced to their set's coordinator, decisions come back in one
// order for all members, and each decision's data phase is moved on until it is over.
//
// submit -> announce -> (negotiation) -> decide -> receive -> advance -> finish. Exchanges skip what lies in between:
// ranks start them in the order of their calls. Each process set runs one operation at a time.
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
  // `patience`: how often a task looks again at a peer's counter (Participants). Makes set 0, of all ranks.
  Scheduler(Common& common, const Config& config, int patience);

  // ---- from any thread

  // Throws UsageError at once for what this rank alone can see is wrong (an unknown set, a rank that is not in it, a
  // name in flight); what only the comparison of ranks shows ends up in the handle.
  std::shared_ptr<Handle> submit(Request request);
  // Members of a process set in order; UsageError if there is no such set.
  std::vector<int> members(int set) const;
  std::vector<int> set_ids() const;
  std::vector<std::string> names_in_flight() const;
  // How many operations on device memory went each way.
  std::map<std::string, std::uint64_t> routes() const;
  Abilities abilities(const Device& device) const { return device_routes_.open_to(device); }
  bool busy() const { return in_flight_.load() > 0; }
  // Operations are under way whose progress rings no bell.
  bool on_devices() const { return on_devices_.load() > 0; }
  // What others wait for has not left yet, whoever of this rank waits.
  bool posting() const { return posting_.load(); }
  // True while other ranks wait for a small operation that this rank has not begun and has not declined yet.
  bool awaited() const { return awaited_.load(); }

  // ---- of the thread that polls; the first three return whether anything moved

  // Tells the coordinators what has been submitted since the last call.
  bool announce();
  // Makes the decisions that have become possible where this rank coordinates, and tells the members.
  bool decide();
  // Moves on what runs, and begins what is next.
  bool advance();
  // A message that another rank's scheduler has sent. TransportError if it makes no sense.
  void receive(int from, std::span<const std::byte> bytes);
  // A rank has left: what waits for it fails.
  void leave(int rank);

  // A small all-reduce that all ranks of its set have done before (collectives/one_shot.h; scheduler_one_shot.cc). Lays
  // its input for the others to see; null where it is to be submitted.
  std::shared_ptr<ProcessSet> lay(int set, std::string_view name, const OneShot::What& what, const std::byte* input);
  // Takes up the result when all have laid theirs; false where it is to be submitted after all.
  bool take_up(ProcessSet& set, const OneShot::What& what, const std::byte* input, std::byte* output);
  // Forgets an input that this rank has laid: the caller goes, and its memory with it. The world fails after this.
  void give_up_laid(ProcessSet& set);
  // Declines what others wait for if this rank does something else, or nothing, for long. Whether there was such a
  // thing.
  bool decline(Time now);
  // Moves on what goes between nodes; whether anything moved.
  bool relay(Time now);

  // Name of the operation of a handle; empty for a promise, which has no operation.
  std::string operation_of(const Handle& handle) const;
  // Whether all that was decided has come to its end.
  bool settled() const;

  // ---- for whoever looks for what is wrong, on the same thread

  const std::map<int, std::shared_ptr<ProcessSet>>& sets() const { return sets_; }
  DeviceInFlight& device_in_flight() { return device_in_flight_; }
  // Calls visit(submission, set) for each that has been announced and is not over, while nobody submits.
  template <class Visit>
  void visit_announced(Visit&& visit) {
    std::lock_guard lock(mutex_);
    for (auto& [key, submission] : outstanding_) {
      if (submission.handle) visit(submission, *sets_.at(submission.request.set));
    }
  }
  // Ends a submission; `error` is null if all went well.
  void finish(Submission& submission, std::exception_ptr error);
  // Ends what runs on a set, and it alone.
  void give_up(ProcessSet& set, const std::exception_ptr& error);
  // The same because of lost ranks: tells the other participants, who may wait for nothing but this rank's part.
  void give_up(ProcessSet& set, const PeerLost& error);
  // Ends all: every submission fails. `broken`: what is on devices is given up.
  void end(const std::exception_ptr& failure, bool broken);
  // Ends what devices wait for peers for: NCCL's work, and meetings of queues.
  void abort_devices();
  // Whether the queues of meetings have nothing left, whose kernels write to memory of peers. No operation runs.
  bool devices_idle();
  // Where all ranks come: NCCL's communicators are closed together.
  void close_nccl();

  // ---- when the world ends

  // This rank's blocks stay for peers that have yet to map them.
  void leave_blocks();
  // MPI may still write to what transfers of operations that were given up were for: they stay for ever.
  void keep_given_up();

 private:
  ProcessSet& add_set(int id, std::vector<int> ranks);
  void remove_set(int id);
  bool is_free(int id) const;
  void require_idle(int set) const;  // with mutex_ held
  void abandon_one_shots(int set);
  bool has_submitted(const ProcessSet& set, std::string_view name) const;
  bool must_decline(ProcessSet& set, const std::vector<OneShot::Number>& awaited, Time now) const;
  bool advance(ProcessSet& set);
  bool resume(Running& running);
  void obey(ProcessSet& set, Decision decision);
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
  const DeviceRoutes device_routes_;

  mutable std::mutex mutex_;  // guards what other threads share with the one that polls: what is below
  std::deque<Submission> submitted_;
  std::unordered_map<std::string, Submission> outstanding_;  // by set and name, from submit to finish
  std::map<int, std::shared_ptr<ProcessSet>> sets_;
  std::map<std::string, std::uint64_t> routes_;

  std::atomic<bool> submitted_any_{false};  // spares announce() the lock
  std::atomic<int> in_flight_{0}, on_devices_{0};
  std::atomic<bool> posting_{false}, awaited_{false};

  // Of the thread that polls.
  struct Early {
    int from;
    Bytes message;
  };
  std::vector<Early> early_;                          // messages about sets that this rank has yet to make
  std::set<int> made_;                                // ids of all sets that this rank has made, removed ones too
  std::vector<std::shared_ptr<ProcessSet>> leaving_;  // sets that are removed, until their devices have done all
  std::vector<Running> given_up_;                     // whose transfers may still be under way
  DeviceInFlight device_in_flight_;
  std::vector<Submission> removals_;  // of process sets, at the end of the current advance()
  StagingPool staging_;               // goes before the sets, on whose queues its memory is used
};

}  // namespace sordino
