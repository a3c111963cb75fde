#include "engine/device_in_flight.h"

#include <algorithm>
#include <iostream>
#include <utility>

#include "base/error.h"

namespace sordino {
namespace {

std::string whole(double value) { return std::to_string(static_cast<long long>(value)); }

std::string list(const std::vector<int>& ranks) {
  std::string all;
  for (const int rank : ranks) all += (all.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + all;
}

std::string who_is_late(const std::vector<int>& ranks) {
  return ranks.empty() ? "a peer is stuck or lost" : list(ranks) + " furthest behind: stuck, lost, or still computing";
}

}  // namespace

void DeviceInFlight::add(const Running& over) {
  One& one = all_.emplace_back(One{over.channel, over.barrier, {}, over.decision.names.front(), over.since});
  for (const Submission& submission : over.submissions) one.handles.push_back(submission.handle);
  count_ = all_.size();
}

void DeviceInFlight::check(Time now) {
  for (One& one : all_) {
    one.over = one.handles.front()->event->done();
    const auto barrier = one.over ? one.barrier.lock() : nullptr;
    const std::vector<int> gone = barrier ? barrier->let_go() : std::vector<int>{};
    if (!gone.empty()) throw PeerLost("'" + one.name + "' has met with what had failed: " + list(gone), gone);
  }
  std::erase_if(all_, [](const One& one) { return one.over; });
  count_ = all_.size();
  for (One& one : all_) {
    if (one.channel) one.channel->communicator().check();
    const double lasted = std::chrono::duration<double>(now - one.since).count();
    if (lasted < std::min(stall_warn_s_, timeout_s_)) continue;
    const auto barrier = one.barrier.lock();
    const std::vector<int> late = barrier ? barrier->late() : std::vector<int>{};
    const std::string text = "'" + one.name + "' has been with the GPU for " + whole(lasted) + " s";
    if (lasted > timeout_s_) {
      throw Timeout(text + ", more than SORDINO_TIMEOUT_S: " + who_is_late(late), one.name, late);
    }
    if (!std::exchange(one.warned, true))
      std::cerr << "sordino: stalled: " + text + ": " + who_is_late(late) + ".\n" << std::flush;
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
