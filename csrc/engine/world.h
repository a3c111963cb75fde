// A world: one transport, its process sets, and everything under way on them. The only object that users of the core
// hold; there is no global one, so a test can run many worlds in one process.
//
// It owns what does the work (Scheduler, ServiceHost, FailureDetector) and has it done by whoever waits, or by a thread
// of its own (Progress).
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/trace.h"
#include "collectives/request.h"
#include "engine/common.h"
#include "engine/failure_detector.h"
#include "engine/scheduler.h"
#include "engine/service_host.h"
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
  std::shared_ptr<World> successor(std::exception_ptr error);
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
  // As submit(), for a caller that calls wait() next: no other thread is woken to move the operation.
  std::shared_ptr<Handle> submit_to_wait(Request request);
  // An all-reduce of one small tensor, of a name, that all ranks of a node have done before: it is done when this
  // returns, without a handle. False where it is to be submitted, which also tells what is wrong if anything is.
  bool allreduce_again(int set, std::string_view name, const OneShot::What& what, const std::byte* input,
                       std::byte* output);
  // Returns when the handle is done (not whether it succeeded: see Handle::error). Where ranks go on without those that
  // are lost, also when the device has done its work: there, who has results tells the others.
  void wait(const Handle& handle);
  // Sets a function that a waiting thread calls every 50 ms, without holding a lock; an exception that it throws ends
  // the wait. Signals are handled so. Giving up an operation like this ends the world, with TransportError on this rank
  // and PeerLost on the others: the result is lost here, and ranks would go on from different places.
  void on_wait(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

  // Whether a failure is latched: every operation raises it, and transfers may still be under way.
  bool failed() const { return common_.failure.broken(); }
  // Throws the failure, if one is latched.
  void rethrow() const { common_.failure.rethrow(); }

  // Members of a process set in order; UsageError if there is no such set. These three throw UsageError in a forked
  // child, where they could wait forever: a thread that the child does not have may have held their lock.
  std::vector<int> members(int set) const;
  std::vector<int> sets() const;
  std::vector<std::string> names_in_flight() const;

  // What this rank can do with the memory of a device.
  Abilities abilities(const Device& device) const { return scheduler_->abilities(device); }
  // How many operations on device memory went each way.
  std::map<std::string, std::uint64_t> routes() const { return scheduler_->routes(); }

  NodeMemory& node_memory() { return transport_->node_memory(); }
  bool in_shared_memory(const void* data, std::size_t bytes) { return node_memory().locate(data, bytes).segment != 0; }
  // Whether this rank can map what a node peer has.
  bool reaches(int rank, const Location& place, const std::shared_ptr<Device>& device);

  // Tells all ranks that this one leaves, fails what is under way here, and stops. Idempotent. `cause`: the error that
  // it leaves in, which the others are told where they wait for it; empty if it is none.
  void shutdown(const std::string& cause = "");
  // This rank is about to die of `cause`: all others fail with PeerLost that says so. Waits for nobody.
  void abort(const std::string& cause);
  // From now on ranks that are lost have left, and this one goes on without them: only operations that need them fail.
  void outlive_peers();

  const Traffic& traffic() const { return common_.traffic; }
  // Seconds in which this rank ran, since some moment: the clock of its deadlines. From any thread.
  double awake_seconds() const {
    const auto now = common_.clock.now(std::chrono::steady_clock::now());
    return std::chrono::duration<double>(now.time_since_epoch()).count();
  }
  double waited_seconds() const { return static_cast<double>(waited_ns_.load()) * 1e-9; }
  Trace& trace() { return common_.trace; }
  // Whether this rank counts what a record of it is made of, from now on.
  void open_ledger(bool opened);
  Ledger& ledger() { return common_.ledger; }

  // What services are made with.
  ServiceContext& service_context() { return *services_; }
  // Has a service answer messages until close_service(), or the end of the world. The number is the same on all ranks;
  // messages for one that is not there are dropped, and who closes one is lost to it on the others.
  void open_service(int number, std::shared_ptr<Service> service);
  void close_service(int number);
  // Somebody who waits is to look again whether what it waits for is done. From any thread.
  void wake() { progress_->notify(); }

 private:
  // How this rank takes part: by a transport of its own, or by one of the membership's newest epoch.
  struct Place {
    std::shared_ptr<membership::Membership> membership;
    membership::View view;
    std::unique_ptr<Transport> transport;
  };
  static Place place_of(std::unique_ptr<Transport> transport, const Config& config);
  static Place place_in(std::shared_ptr<membership::Membership> membership);
  World(Place place, const Config& config, std::uint64_t first_tag);
  bool poll();
  void receive(int from, std::span<const std::byte> message);
  Work work() const;
  // A forked child has the memory of a world, but neither its thread nor its place among the ranks.
  bool forked() const { return getpid() != process_; }
  // Throws UsageError in a forked child.
  void require_own_process() const;
  void tell_freed();
  void say_goodbye(const std::string& cause);
  void flush(std::chrono::milliseconds limit);
  bool drain_devices(std::chrono::milliseconds limit);
  void count_wait(Time begin);
  void interrupted(const std::string& operation);

  const Config config_;
  const std::shared_ptr<membership::Membership> membership_;  // where ranks go on without those that are lost
  const membership::View view_;                               // what this world is of it
  const std::unique_ptr<Transport> transport_;
  Common common_;
  const Sink receive_ = [this](int from, std::span<const std::byte> message) { receive(from, message); };
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<ServiceHost> services_;
  std::unique_ptr<FailureDetector> failures_;

  std::function<void()> interrupt_;
  int patience_;  // how often a rank looks at what others do before it does something else
  std::atomic<std::uint64_t> waited_ns_{0};
  std::atomic<bool> may_go_on_{false};  // the membership has gone on, or cannot
  std::atomic<bool> retired_{false};    // another world has taken this one's place
  std::atomic<bool> shut_down_{false};
  Time last_watch_{};
  std::atomic<Time> last_move_{};
  const pid_t process_ = getpid();
  std::unique_ptr<Progress> progress_;
};

}  // namespace sordino
