// World: one transport, its process sets, and all operations in flight on them. It is the only object that users of the
// core hold. No world is global, so a test can run many worlds in one process.
//
// A world owns the objects that do the work (Scheduler, ServiceHost, PointToPoint, FailureDetector). They run in the
// threads that wait, or in a thread of the world's own (Progress).
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/forks.h"
#include "base/trace.h"
#include "collectives/request.h"
#include "engine/common.h"
#include "engine/failure_detector.h"
#include "engine/point_to_point.h"
#include "engine/scheduler.h"
#include "engine/service_host.h"
#include "engine/waits.h"
#include "membership/membership.h"
#include "progress/progress.h"

namespace sordino {

class World {
 public:
  World(std::unique_ptr<Transport> transport, const Config& config);
  ~World();

  // Where ranks survive losses (Config::survive_losses): returns the world of the remaining ranks once they have agreed
  // on it. This world has failed, or fails now with `error`; its holder then releases it. Throws NoQuorum or Evicted if
  // this rank cannot continue. A world that ends with its first loss throws `error` itself.
  std::shared_ptr<World> successor(std::exception_ptr error);
  // Number of worlds before this one.
  std::uint32_t epoch() const { return view_.epoch; }
  // This world's ranks as numbered in the first world.
  const std::vector<int>& identities() const { return view_.members; }
  bool survives_losses() const { return membership_ != nullptr; }

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const Transport& transport() const { return *transport_; }

  // Starts an operation. Throws UsageError for errors that this rank can detect alone (an unknown set, a rank that is
  // not in it, a name in flight). The handle reports errors that only a comparison of the ranks shows.
  std::shared_ptr<Handle> submit(Request request);
  // As submit(), for a caller that calls wait() next: no other thread is woken to move the operation.
  std::shared_ptr<Handle> submit_to_wait(Request request);
  // What this rank knows of an operation that all ranks have done before; empty if it knows nothing, or if another
  // thread polls. While `turn` is held, no other thread polls, and the holder may call only repeat(), or release it.
  struct Found {
    std::shared_ptr<const Repeat> repeat;
    std::unique_lock<std::mutex> turn;
  };
  Found find(int set, std::string_view name, const Signature& what);
  // Repeats a small operation (collectives/one_shot.h). There is no handle: the operation is done when this returns
  // true. False if it has to be submitted instead, also while another thread polls; submit() then reports errors.
  // `before_waiting` is called at most once: if the other ranks do not enter within about a microsecond, or at once if
  // spinning would keep them from entering.
  bool repeat(int set, Found what, const std::byte* input, std::byte* output,
              const std::function<void()>& before_waiting = {});
  // Waits until the handle is done, whether or not it succeeded (see Handle::error). Where ranks survive losses, it
  // also waits for the device's work, because such a rank reports to the others that it has its results.
  void wait(const Handle& handle);
  // Sets a function that a waiting thread calls about every 50 ms without holding a lock, to handle signals. An
  // exception that it throws ends the wait and with it the world: TransportError on this rank, PeerLost on the others.
  // The reason: the result is lost here, so ranks would continue from different points of the program.
  void on_wait(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

  // Starts to send or to receive a message (engine/point_to_point.h). Throws UsageError for a process set without this
  // rank or the peer, or a negative tag, and the failure of a failed world. The handle reports all other errors.
  std::shared_ptr<Handle> start_message(std::shared_ptr<Posting> call);
  // As start_message(), but waits until the handle is done.
  std::shared_ptr<Handle> run_message(std::shared_ptr<Posting> call);

  // True if this world has failed rather than been shut down. Every operation raises the failure, and transfers may
  // still be under way.
  bool failed() const { return common_.failure.broken(); }
  void rethrow() const { common_.failure.rethrow(); }

  // Members of a process set in order; UsageError if there is no such set. These three functions also throw UsageError
  // in a forked child. There they could wait forever: a thread that only the parent has may have held their lock.
  std::vector<int> members(int set) const;
  std::vector<int> sets() const;
  std::vector<std::string> names_in_flight() const;

  // The unfinished operations of this rank, and the ranks that each waits for. nullopt if no thread of this process
  // polls within `limit`, because it is stopped or the world has been shut down.
  std::optional<std::vector<Wait>> waits(std::chrono::milliseconds limit) {
    return waits_.ask(limit, [this] { progress_->notify(); });
  }

  // Routes that this rank has for the memory of a device.
  Abilities abilities(const Device& device) const { return scheduler_->abilities(device); }
  // Number of operations on device memory, by route.
  std::map<std::string, std::uint64_t> routes() const { return scheduler_->routes(); }

  NodeMemory& node_memory() { return transport_->node_memory(); }
  bool in_shared_memory(const void* data, std::size_t bytes) { return node_memory().locate(data, bytes).segment != 0; }
  // True if this rank can map the memory `place` of the node peer `rank`.
  bool reaches(int rank, const Location& place, const std::shared_ptr<Device>& device);

  // Tells all ranks that this one leaves, fails its operations in flight, and stops. Idempotent. `cause`, `lost`: the
  // error that makes it leave, and the ranks that the error names as lost; ranks that wait for this one repeat both in
  // their errors. Empty if it leaves without an error.
  void shutdown(const std::string& cause = "", const std::vector<int>& lost = {});
  // Makes all other ranks fail with PeerLost, before this rank ends because of `cause`. The error names this rank, or
  // the ranks `lost` if their loss ends this rank. Waits for no rank.
  void abort(const std::string& cause, const std::vector<int>& lost = {});
  // Sets the timeout of this rank's operations on a process set, in seconds, instead of SORDINO_TIMEOUT_S. Throws
  // UsageError if there is no such set, or if `seconds` is not above 0.
  void set_timeout(int set, double seconds);
  // From now on a lost rank counts as one that has left: only operations that need it fail, and this rank continues.
  void tolerate_losses();

  const TrafficCounters& traffic() const { return common_.traffic; }
  // Seconds for which this rank has run since an arbitrary moment: the clock of its deadlines. From any thread.
  double awake_seconds() const {
    const auto now = common_.clock.now(std::chrono::steady_clock::now());
    return std::chrono::duration<double>(now.time_since_epoch()).count();
  }
  double waited_seconds() const { return static_cast<double>(waited_ns_.load()) * 1e-9; }
  Trace& trace() { return common_.trace; }
  // Starts the trace of SORDINO_TIMELINE, if it is set and this is rank 0. For the first world of a job.
  void start_trace_of_settings();
  // Starts or stops counting what the run record needs.
  void open_ledger(bool opened);
  Ledger& ledger() { return common_.ledger; }

  // The context that the constructors of services take.
  ServiceContext& service_context() { return *services_; }
  // Lets a service answer messages until close_service() or the end of the world. A service has the same number on all
  // ranks. Messages for a number that is not open are dropped. When a rank closes a service, the same service of the
  // other ranks treats it as lost.
  void open_service(int number, std::shared_ptr<Service> service);
  void close_service(int number);
  // Makes waiting threads check again whether they are done. From any thread.
  void wake() { progress_->notify(); }

 private:
  // How often a waiting thread reads memory that other ranks write, between two polls: a poll costs as much as several
  // yields.
  static constexpr int kLooks = 8;
  // How often the caller of repeat() reads it before `before_waiting` is called.
  static constexpr int kFirstLooks = 16;

  // This rank's place in the job: its own transport, or the transport of the membership's newest epoch.
  struct Position {
    std::shared_ptr<membership::Membership> membership;
    membership::View view;
    std::unique_ptr<Transport> transport;
  };
  static Position position_of(std::unique_ptr<Transport> transport, const Config& config);
  static Position position_in(std::shared_ptr<membership::Membership> membership);
  World(Position place, const Config& config, std::uint64_t first_tag);
  bool poll();
  void begin_submitted();
  void receive(int from, std::span<const std::byte> message);
  Work work() const;
  // A forked child has the memory of a world, but neither its thread nor its rank.
  bool forked() const { return forks() != forks_; }
  // Throws UsageError in a forked child.
  void require_own_process() const;
  void tell_freed();
  void say_goodbye(const std::string& cause, const std::vector<int>& lost);
  void flush(std::chrono::milliseconds limit);
  bool drain_devices(std::chrono::milliseconds limit);
  void count_wait(Time begin);
  void check(Posting& call) const;
  void move_messages(const std::function<void()>& move);
  void interrupted(const std::string& operation);
  bool is_over_soon(const OneShot& shot) const;
  void wait_for_turn(std::unique_lock<std::mutex>& polling, ProcessSet& entered, const std::string& name);

  const Config config_;
  const std::shared_ptr<membership::Membership> membership_;  // where ranks survive losses, else null
  const membership::View view_;                               // the epoch and the members of this world
  const std::unique_ptr<Transport> transport_;
  Common common_;
  const Sink receive_ = [this](int from, std::span<const std::byte> message) { receive(from, message); };
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<ServiceHost> services_;
  std::unique_ptr<PointToPoint> messages_;
  std::unique_ptr<FailureDetector> failures_;

  std::function<void()> interrupt_;
  int patience_;  // how many times a rank reads its peers' progress before it does something else
  std::atomic<std::uint64_t> waited_ns_{0};
  std::atomic<bool> may_go_on_{false};  // the membership has reached the next epoch, or never will
  std::atomic<bool> retired_{false};    // another world has replaced this one
  std::atomic<bool> shut_down_{false};
  Time last_watch_{};
  WaitsQuestion waits_;
  std::atomic<Time> last_move_{};
  const std::uint32_t forks_ = forks();
  std::unique_ptr<Progress> progress_;
};

}  // namespace sordino
