#include "engine/nccl_in_flight.h"

#include "base/error.h"

namespace sordino {

void NcclInFlight::add(const Running& over) {
  One& one = all_.emplace_back(One{over.channel, {}, over.decision.names.front(), over.since});
  for (const Submission& submission : over.submissions) one.handles.push_back(submission.handle);
}

void NcclInFlight::check(Time now, double timeout_s) {
  std::erase_if(all_, [](const One& one) { return one.handles.front()->event->done(); });
  for (const One& one : all_) {
    one.channel->communicator().check();
    const double lasted = std::chrono::duration<double>(now - one.since).count();
    if (lasted > timeout_s) {
      throw Timeout("'" + one.name + "' has been with NCCL for " + std::to_string(static_cast<long long>(lasted)) +
                        " s, more than SORDINO_TIMEOUT_S: a peer is stuck or lost",
                    one.name, {});
    }
  }
}

void NcclInFlight::give_up() {
  for (const One& one : all_) {
    for (const auto& handle : one.handles) handle->undone = true;
  }
}

void NcclInFlight::give_up(const nccl::Channel& channel) {
  for (const One& one : all_) {
    if (one.channel.get() != &channel) continue;
    for (const auto& handle : one.handles) handle->undone = true;
  }
  std::erase_if(all_, [&](const One& one) { return one.channel.get() == &channel; });
}

}  // namespace sordino
