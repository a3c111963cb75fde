#include "engine/device_in_flight.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "engine/telling.h"

namespace sordino {
namespace {

std::string who_is_late(const std::vector<int>& ranks) {
  if (ranks.empty()) return "a peer is stuck or lost";
  return named(ranks) + (ranks.size() == 1 ? " is" : " are") + " furthest behind: stuck, lost, or still computing";
}

}  // namespace

void DeviceInFlight::add(const Running& over, double timeout_s) {
  One& one = all_.emplace_back(
      One{over.channel, over.barrier, {}, over.decision.names.front(), over.awaited_since, timeout_s});
  for (const Submission& submission : over.submissions) one.handles.push_back(submission.handle);
  count_ = all_.size();
}

void DeviceInFlight::check(AwakeTime now) {
  for (One& one : all_) {
    one.over = one.handles.front()->event->done();
    const auto barrier = one.over ? one.barrier.lock() : nullptr;
    const std::vector<int> gone = barrier ? barrier->let_go() : std::vector<int>{};
    if (!gone.empty()) throw PeerLost("'" + one.name + "' met a failed operation of " + named(gone), gone);
  }
  std::erase_if(all_, [](const One& one) { return one.over; });
  count_ = all_.size();
  for (One& one : all_) {
    if (one.channel) one.channel->communicator().check();
    const double lasted = seconds(one.since, now);
    const double timeout = one.timeout_s > 0 ? one.timeout_s : timeout_s_;
    if (lasted < std::min(stall_warn_s_, timeout)) continue;
    const auto barrier = one.barrier.lock();
    const std::vector<int> late = barrier ? barrier->late() : std::vector<int>{};
    const std::string text = "'" + one.name + "' has been on the GPU for " + whole(lasted) + " s";
    if (lasted > timeout) throw Timeout(text + beyond(one.timeout_s) + ": " + who_is_late(late), one.name, late);
    if (!std::exchange(one.warned, true))
      log::say(log::Level::kWarning, rank_, "stalled: " + text + ": " + who_is_late(late) + ".");
  }
}

void DeviceInFlight::visit(AwakeTime now,
                           const std::function<void(const std::string&, double, std::vector<int>)>& visitor) const {
  for (const One& one : all_) {
    const auto barrier = one.barrier.lock();
    visitor(one.name, seconds(one.since, now), barrier ? barrier->late() : std::vector<int>{});
  }
}

void DeviceInFlight::give_up() {
  for (const One& one : all_) {
    for (const auto& handle : one.handles) handle->undone = true;
  }
}

void DeviceInFlight::give_up(const nccl::Channel& channel) {
  for (const One& one : all_) {
    if (one.channel.get() != &channel) continue;
    for (const auto& handle : one.handles) handle->undone = true;
  }
  std::erase_if(all_, [&](const One& one) { return one.channel.get() == &channel; });
  count_ = all_.size();
}

void DeviceInFlight::clear() {
  all_.clear();
  count_ = 0;
}

}  // namespace sordino
