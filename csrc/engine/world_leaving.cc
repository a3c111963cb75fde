// Departure of a rank from a world: in order, because of an error, or after losses.
#include <thread>

#include "engine/control.h"
#include "engine/world.h"

namespace sordino {

using std::chrono::milliseconds;

namespace {

// Drops ranks that do not exist: the program may have created the error that names them.
std::vector<int> existing(std::vector<int> ranks, int size) {
  std::erase_if(ranks, [size](int rank) { return rank < 0 || rank >= size; });
  return ranks;
}

}  // namespace

void World::shutdown(const std::string& cause, const std::vector<int>& lost) {
  if (forked() || shut_down_.exchange(true)) return;
  progress_->stop();
  if (retired_) return;
  const bool failed = common_.failure.latched();
  if (!failed) {
    // Completes all decided operations, so that no peer waits for this rank's part of them. Operations that this rank
    // has announced or entered in a turn, but others have not, fail on all ranks.
    Deadline limit(std::chrono::seconds(1));
    progress_->alone([this] {
      poll();
      if (!common_.failure.latched()) scheduler_->withdraw();
    });
    progress_->wait([&] { return common_.failure.latched() || scheduler_->settled() || limit.passed(); });
    // Then waits for work on devices, which does not need this thread; its own deadline limits that wait.
    progress_->wait([this] { return common_.failure.latched() || scheduler_->device_in_flight().empty(); });
    progress_->alone([&] { say_goodbye(cause, lost); });
    flush(milliseconds(1000));
  }
  if (failed && membership_) {
    progress_->alone([this] { membership_->depart("it has shut down"); });
    flush(milliseconds(200));
  }
  progress_->alone([this] {
    failures_->fail(std::make_exception_ptr(Error("Sordino has been shut down")), false);
    scheduler_->close_nccl();
  });
  trace().stop();
}

void World::say_goodbye(const std::string& cause, const std::vector<int>& lost) {
  try {
    common_.peers.post_to_all(goodbye(cause, existing(lost, size())));
    if (membership_) membership_->say_goodbye();
  } catch (const Error&) {
    transport_->abandon();  // a peer has died meanwhile, so the goodbye cannot be delivered
  }
}

void World::abort(const std::string& cause, const std::vector<int>& lost) {
  if (forked() || shut_down_) return;
  progress_->stop();
  if (retired_) return;
  const std::string text =
      "rank " + std::to_string(rank()) + " on " + transport_->host_of(rank()) + " has ended: " + cause;
  std::vector<int> named = existing(lost, size());
  if (named.empty()) named = {rank()};
  progress_->alone([&] {
    failures_->fail(std::make_exception_ptr(PeerLost(text, named)), membership_ == nullptr);
    if (membership_) scheduler_->abort_devices();
  });
  if (membership_) {
    drain_devices(milliseconds(1000));  // before the other ranks continue
    progress_->alone([&] { membership_->depart("it has ended: " + cause); });
  }
  flush(milliseconds(200));
  shut_down_ = true;
}

// Waits until devices have no work left that writes to memory of peers; polls meanwhile. False if `limit` passes first.
bool World::drain_devices(milliseconds limit) {
  bool idle = false;
  for (Deadline end(limit); !idle && !end.passed();) {
    progress_->alone([&] {
      poll();
      idle = scheduler_->devices_idle();
    });
    if (!idle) std::this_thread::sleep_for(milliseconds(1));
  }
  return idle;
}

// Waits, for at most `limit`, until all posted messages have been sent.
void World::flush(milliseconds limit) {
  Deadline end(limit);
  const bool was_failed = failed();
  progress_->wait([&] { return transport_->idle() || failed() != was_failed || end.passed(); });
}

}  // namespace sordino
