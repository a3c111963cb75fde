// Failure detector of one rank. It notices a lost peer, a stalled operation, or a passed deadline. Then it latches the
// failure (FailureLatch), tells the other ranks, and fails all operations, so that every wait raises it. What fails
// when a rank is lost depends on the world:
//
//   Peers::tolerates_losses()         only operations that need the lost rank; the world continues
//   else, with a membership           the world, on all ranks; the membership learns which ranks are to blame
//   else                              the world, on all ranks
#pragma once

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "base/awake_clock.h"
#include "base/config.h"
#include "engine/common.h"
#include "engine/point_to_point.h"
#include "engine/scheduler.h"
#include "engine/service_host.h"
#include "engine/waits.h"
#include "membership/membership.h"

namespace sordino {

// Used by the polling thread only.
class FailureDetector {
 public:
  // `receive` handles messages that the transport delivers. `membership`: null where the first loss ends the world.
  FailureDetector(Common& common, Scheduler& scheduler, ServiceHost& services, PointToPoint& messages,
                  const Config& config, Sink receive, membership::Membership* membership, const membership::View& view)
      : common_(common),
        scheduler_(scheduler),
        services_(services),
        messages_(messages),
        stall_warn_s_(config.stall_warn_s),
        timeout_s_(config.timeout_s),
        receive_(std::move(receive)),
        membership_(membership),
        view_(view) {}

  // Checks for losses, stalls and deadlines. Throws the error that ends the world.
  void watch(AwakeTime now);
  std::vector<Wait> waits(AwakeTime now);
  // Handles the departure or loss of a rank; `certain` is false if it cannot be reached but may be alive. `how`,
  // `cause`, `lost`: see Peers::note_left().
  void note_left(int rank, bool certain, const std::string& how, const std::string& cause = "",
                 std::vector<int> lost = {});
  void receive_goodbye(int from, Reader& reader);
  // Handles the report of a failed rank. Throws the error that this rank then raises, unless it tolerates losses.
  void receive_failure(int from, Reader& reader);
  // Handles an exception that was thrown while this rank polled.
  void caught(std::exception_ptr failure) { fail(std::move(failure), !told_); }
  // Ends the world; only the first call counts. `tell`: make the other ranks fail, too.
  void fail(std::exception_ptr failure, bool tell);

 private:
  void warn(std::string text) const;
  std::vector<int> read_ranks(int from, Reader& reader) const;
  void watch_losses();
  void lose(int rank, const std::string& why, bool certain);
  void watch_set(ProcessSet& set, AwakeTime now);
  void watch_running(const ProcessSet& set, Running& running, AwakeTime now) const;
  void watch_entered(ProcessSet& set, AwakeTime now) const;
  void end_serving(ProcessSet& set);
  void watch_coordinated(ProcessSet& set, AwakeTime now);
  void watch_own(AwakeTime now);
  void watch_messages(AwakeTime now);
  void note_waits(AwakeTime now);
  double set_timeout_of(const Posting& call);
  void tell_peers(const std::exception_ptr& failure);
  void tell_membership(const std::exception_ptr& failure);
  // Seconds after which an operation of a set fails.
  double timeout_of(const ProcessSet& set) const { return timeout_or_own(set.timeout_s); }
  double timeout_or_own(double of_set) const { return of_set > 0 ? of_set : timeout_s_; }
  bool is_late(double timeout_s, double seconds) const { return seconds >= std::min(stall_warn_s_, timeout_s); }

  Common& common_;
  Scheduler& scheduler_;
  ServiceHost& services_;
  PointToPoint& messages_;
  const double stall_warn_s_, timeout_s_;
  const Sink receive_;
  membership::Membership* const membership_;
  const membership::View& view_;
  bool told_ = false;       // the failure came from a peer, which has told all others
  std::vector<int> stuck_;  // ranks that did not reach an operation within its deadline
};

}  // namespace sordino
