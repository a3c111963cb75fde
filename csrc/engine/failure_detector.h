// How a rank notices that something is wrong (a lost peer, an operation that stands still, a deadline), and what it
// does then: the failure is latched, told to everybody, and raised wherever somebody waits.
//
// Where ranks go on without those that are lost, an operation that needs one fails alone (Peers::outlive), or the world
// as a whole ends and the membership is told who is to blame.
#pragma once

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "base/awake_clock.h"
#include "base/config.h"
#include "engine/common.h"
#include "engine/scheduler.h"
#include "engine/service_host.h"
#include "membership/membership.h"

namespace sordino {

// Of the thread that polls.
class FailureDetector {
 public:
  // `receive` takes what the transport delivers. `membership`: null where the first loss ends the world.
  FailureDetector(Common& common, Scheduler& scheduler, ServiceHost& services, const Config& config, Sink receive,
                  membership::Membership* membership, const membership::View& view)
      : common_(common),
        scheduler_(scheduler),
        services_(services),
        stall_warn_s_(config.stall_warn_s),
        timeout_s_(config.timeout_s),
        receive_(std::move(receive)),
        membership_(membership),
        view_(view) {}

  // Looks at everything that may be wrong. Throws what ends the world.
  void watch(AwakeTime now);
  // A rank has said goodbye, or (not `certain`) cannot be reached.
  // `cause`: the error in which it has shut down, if it was one.
  void leave(int rank, bool certain, std::string cause = "");
  // Another rank says that it has failed. Throws what that is here.
  void receive_failure(int from, Reader& reader);
  // Something was thrown while this rank polled.
  void caught(std::exception_ptr failure) { fail(std::move(failure), !told_); }
  // Ends the world; the first time only. `tell`: the others fail too.
  void fail(std::exception_ptr failure, bool tell);

 private:
  void warn(std::string text) const;  // a log line of this rank
  void watch_losses();
  void lose(int rank, const std::string& why, bool certain);
  void watch_set(ProcessSet& set, AwakeTime now);
  void watch_running(Running& running, AwakeTime now) const;
  void watch_laid(ProcessSet& set, AwakeTime now) const;
  void end_serving(ProcessSet& set);
  void watch_coordinated(ProcessSet& set, AwakeTime now);
  void watch_own(AwakeTime now);
  void tell_peers(const std::exception_ptr& failure);
  void tell_membership(const std::exception_ptr& failure);
  bool is_late(double seconds) const { return seconds >= std::min(stall_warn_s_, timeout_s_); }

  Common& common_;
  Scheduler& scheduler_;
  ServiceHost& services_;
  const double stall_warn_s_, timeout_s_;
  const Sink receive_;
  membership::Membership* const membership_;
  const membership::View& view_;
  bool told_ = false;       // the failure came from a peer, which has told all others
  std::vector<int> stuck_;  // who has not come to an operation within its deadline
};

}  // namespace sordino
