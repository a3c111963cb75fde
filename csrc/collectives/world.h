// A world: one transport, its process sets, and everything under way on them. The only object that users of the core
// hold; there is no global one, so a test can run many worlds in one process.
#pragma once

#include <unistd.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/config.h"
#include "base/trace.h"
#include "collectives/negotiation.h"
#include "collectives/process_set.h"
#include "collectives/request.h"
#include "collectives/service.h"
#include "collectives/team.h"
#include "membership/membership.h"
#include "progress/progress.h"

namespace sordino {

class World {
 public:
  World(std::unique_ptr<Transport> transport, const Config& config);
  ~World();

  // Where ranks go on without those that are lost (Config::outlast): the world of those that are left, when they have
  // agreed on it. This one has failed, or fails now with `error`; whoever holds it lets go of it. Throws NoQuorum or
  // Evicted where this rank cannot go on, and the failure of a world that ends with its first loss.
  std::shared_ptr<World> succeed(std::exception_ptr error);
  // How many worlds there have been before this one.
  std::uint32_t epoch() const { return view_.epoch; }
  // Who this world's ranks are: their ranks in the first one.
  const std::vector<int>& identities() const { return view_.members; }
  bool outlasts() const { return membership_ != nullptr; }

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const Transport& transport() const { return *transport_; }

  // Starts an operation. Throws UsageError at once for what this rank alone can see is wrong (an unknown set, a rank
  // that is not in it, a name in flight); what only the comparison of ranks shows ends up in the handle.
  std::shared_ptr<Handle> submit(Request request);
  // submit() and wait() in one: nobody else is woken for it.
  std::shared_ptr<Handle> run(Request request);
  // Returns when the handle is done (not whether it succeeded: see Handle::error).
  void wait(const Handle& handle);

  // Whether a failure is latched: every operation raises it, and transfers may still be under way.
  bool failed() const { return broken_.load(); }
  // Throws the failure, if one is latched.
  void rethrow() const {
    std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }

  // Members of a process set in order; UsageError if there is no such set.
  std::vector<int> members(int set) const;
  std::vector<int> sets() const;

  // What this rank can do with the memory of a device.
  Abilities abilities(const Device& device) const;
  // How many operations on device memory went each way.
  std::map<std::string, std::uint64_t> routes() const;

  NodeMemory& node_memory() { return transport_->node_memory(); }
  bool in_shared_memory(const void* data, std::size_t bytes) {
    return transport_->node_memory().locate(data, bytes).segment != 0;
  }

  // Whether this rank can map what a node peer has.
  bool reaches(int rank, const Location& place, const std::shared_ptr<Device>& device);

  // Tells all ranks that this one leaves, fails what is under way here, and stops. Idempotent.
  void shutdown();
  // This rank is about to die of `cause`: all others fail with PeerLost that says so. Waits for nobody.
  void abort(const std::string& cause);

  const Traffic& traffic() const { return traffic_; }
  double waited_seconds() const { return static_cast<double>(waited_ns_.load()) * 1e-9; }
  Trace& trace() { return trace_; }
  std::vector<std::string> names_in_flight() const;

  // From now on ranks that are lost have left, and this one goes on without them: only operations that need them fail.
  void outlive_peers();

  // Has a service answer messages until close_service(), or the end of the world. The number is the same on all ranks;
  // messages for one that is not there are dropped, and who closes one is lost to it on the others.
  void open_service(int number, std::shared_ptr<Service> service);
  void close_service(int number);
  // There is something for services to do. From any thread.
  void wake() { progress_->notify(); }
  // For services, while they are called:
  Transport& data() { return *transport_; }
  void post_to_service(int number, int to, const Bytes& message);
  // A tag under which nobody else sends to this rank.
  Tag next_tag();
  void count_sent(int to, std::size_t bytes);
  bool has_left(int rank) const { return gone_[static_cast<std::size_t>(rank)]; }

 private:
  World(std::shared_ptr<membership::Membership> membership, const World& before);
  void begin();
  bool poll();
  bool busy() const;
  // A forked child has the memory of a world, but neither its thread nor its place among the ranks.
  bool forked() const { return getpid() != process_; }
  std::shared_ptr<Handle> enqueue(Request request);
  bool announce_submissions();
  bool decide();
  void obey(ProcessSet& set, Decision decision);
  void check(const ProcessSet& set, const Decision& decision, const std::vector<Submission>& submissions) const;
  bool advance(ProcessSet& set);
  void receive(int from, std::span<const std::byte> message);
  void watch(Time now);
  void watch_running(Running& running, Time now) const;
  void watch_flying(Time now);
  static PeerLost deserted(const Running& running, int rank);
  void give_up(ProcessSet& set, std::exception_ptr error);
  void lose(int rank, const std::string& why, bool certain);
  void end_service(ProcessSet& set);
  void watch_coordinated(ProcessSet& set, Time now);
  void watch_own(Time now);
  void leave(int rank, bool certain);
  static void tell_left(ProcessSet& set, int rank);
  void require_idle(int set) const;  // with mutex_ held
  void fail(std::exception_ptr failure, bool tell);
  void tell_peers(const std::exception_ptr& failure);
  void tell_membership(const std::exception_ptr& failure);
  void finish(Submission& submission, std::exception_ptr error);
  ProcessSet& add_set(int id, std::vector<int> ranks);
  void remove_set(int id);
  void post_to_members(const ProcessSet& set, const Bytes& message);

  const Config config_;
  std::shared_ptr<membership::Membership> membership_;  // where ranks go on without those that are lost
  membership::View view_;                               // what this world is of it
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Staging> staging_;
  std::atomic<int> on_devices_{0};  // operations whose progress rings no bell
  Traffic traffic_;
  Trace trace_;
  std::atomic<std::uint64_t> waited_ns_{0};

  mutable std::mutex mutex_;  // guards what other threads share with poll(): what is below
  std::deque<Submission> submitted_;
  std::unordered_map<std::string, Submission> outstanding_;  // by set and name, from submit to finish
  std::exception_ptr failure_;
  std::map<int, std::unique_ptr<ProcessSet>> sets_;
  std::map<std::string, std::uint64_t> routes_;

  std::atomic<bool> submitted_any_{false};  // spares poll() the lock
  std::atomic<int> in_flight_{0};
  std::vector<bool> gone_;  // ranks that have shut down
  struct Early {
    int set, from;
    Bytes message;
  };
  std::vector<Early> early_;  // messages about sets that this rank has yet to make
  int newest_set_ = -1;
  std::vector<Running> graveyard_;
  // What NCCL has yet to do on the device; if a peer is lost it will not end by itself.
  struct Flying {
    std::shared_ptr<nccl::Channel> channel;
    std::vector<std::shared_ptr<Handle>> handles;
    std::string name;
    Time since;
  };
  std::vector<Flying> flying_;
  int member(int rank) const { return view_.members[static_cast<std::size_t>(rank)]; }
  void flush(std::chrono::milliseconds limit);
  void land(const std::shared_ptr<nccl::Channel>& channel);
  bool has_nccl() const;
  mutable std::once_flag asked_nccl_;
  mutable bool has_nccl_ = false;
  std::vector<Submission> removals_;  // of process sets, at the end of the current poll
  std::map<int, std::shared_ptr<Service>> services_;
  struct Closed {
    std::shared_ptr<Service> service;
    Time since;
  };
  std::vector<Closed> closed_;       // whose memory transfers may still touch, or peers read
  std::atomic<bool> serves_{false};  // there are services
  std::uint64_t tags_ = 0;
  bool outlives_ = false;
  bool told_ = false;                     // the failure came from a peer, which has told all others
  std::vector<int> stuck_;                // who has not come to an operation within its deadline
  std::atomic<bool> may_succeed_{false};  // the membership has gone on, or cannot
  std::atomic<bool> retired_{false};      // another world has taken this one's place
  std::atomic<bool> shut_down_{false};
  std::atomic<bool> broken_{false};  // failed, rather than shut down
  Time last_watch_{};
  std::atomic<Time> last_move_{};
  const pid_t process_ = getpid();
  std::unique_ptr<Progress> progress_;
};

}  // namespace sordino
