// How a world notices that something is wrong (lost peers, stalls, deadlines), and what it does then: the failure is
// latched, told to everybody, and raised wherever somebody waits.
#include <iostream>
#include <thread>

#include "collectives/control.h"
#include "collectives/world.h"

namespace sordino {
namespace {

using std::chrono::steady_clock;

std::string list(const std::vector<int>& ranks) {
  std::string out;
  for (std::size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
  return out;
}

std::string whole(double value) { return std::to_string(static_cast<long long>(value)); }

double seconds(Time from, Time to) { return std::chrono::duration<double>(to - from).count(); }

}  // namespace

void World::watch(Time now) {
  const std::vector<std::uint64_t> freed = transport_->node_memory().take_freed();
  if (!freed.empty()) {
    const Bytes message = Writer().put(Message::kFreed).put(freed).take();
    for (const int peer : sets_.at(0)->node_peers()) {
      if (!gone_[static_cast<std::size_t>(peer)]) transport_->post(peer, message);
    }
  }
  const std::vector<Loss> losses = transport_->take_losses();
  if (!losses.empty()) {
    // A goodbye may have been sent just before the end.
    transport_->poll([this](int from, std::span<const std::byte> message) { receive(from, message); });
    for (const Loss& loss : losses) {
      if (gone_[static_cast<std::size_t>(loss.rank)]) continue;
      if (outlives_) {
        lose(loss.rank, loss.cause, loss.certain);
        continue;
      }
      throw PeerLost(
          "rank " + std::to_string(loss.rank) + " on " + transport_->host_of(loss.rank) + " is lost: " + loss.cause,
          {loss.rank});
    }
  }
  for (auto& [id, set] : sets_) {
    if (set->running && set->running->submissions.front().request.serving) {
      end_service(*set);
    } else if (set->running) {
      try {
        watch_running(*set->running, now);
      } catch (const PeerLost&) {
        if (!outlives_) throw;
        give_up(*set, std::current_exception());
      }
    }
    if (set->negotiation) watch_coordinated(*set, now);
  }
  watch_flying(now);
  watch_own(now);
}

void World::watch_flying(Time now) {
  std::erase_if(flying_, [](const Flying& one) { return one.handles.front()->event->done(); });
  for (const Flying& one : flying_) {
    one.channel->communicator().check();
    if (seconds(one.since, now) > config_.timeout_s) {
      throw Timeout("'" + one.name + "' has been with NCCL for " + whole(seconds(one.since, now)) +
                        " s, more than SORDINO_TIMEOUT_S: a peer is stuck or lost",
                    one.name, {});
    }
  }
}

PeerLost World::deserted(const Running& running, int rank) {
  return PeerLost("'" + running.decision.names.front() + "' waits for rank " + std::to_string(rank) +
                      ", which has shut down in the middle of it",
                  {rank});
}

// What waits for ranks that have left ends by itself; what comes after it will not begin, for they have a part in it.
void World::end_service(ProcessSet& set) {
  for (const int rank : set.running->team->laggards()) {
    if (!gone_[static_cast<std::size_t>(rank)]) continue;
    give_up(set, std::make_exception_ptr(deserted(*set.running, rank)));
    return;
  }
}

// Ends what runs on a set, and it alone.
void World::give_up(ProcessSet& set, std::exception_ptr error) {
  graveyard_.push_back(std::move(*set.running));  // its transfers may still be under way
  set.running.reset();
  if (graveyard_.back().channel) land(graveyard_.back().channel);
  for (Submission& submission : graveyard_.back().submissions) {
    if (const auto& device = submission.request.device) {
      submission.handle->device = device;
      submission.handle->event = device->record(device->queue());  // what was begun still works on the tensors
    }
    finish(submission, error);
  }
}

void World::lose(int peer, const std::string& why, bool certain) {
  if (gone_[static_cast<std::size_t>(peer)]) return;
  std::cerr << "sordino: rank " + std::to_string(peer) + " on " + transport_->host_of(peer) + " is lost: " + why +
                   ". Rank " + std::to_string(rank()) + " goes on without it.\n"
            << std::flush;
  transport_->abandon();
  leave(peer, certain);
}

void World::watch_running(Running& running, Time now) const {
  if (running.team->dormant) running.since = now;
  const double lasted = seconds(running.since, now);
  if (lasted > 1) {
    for (const int rank : running.team->laggards()) {
      if (gone_[static_cast<std::size_t>(rank)]) throw deserted(running, rank);
    }
  }
  if (lasted < std::min(config_.stall_warn_s, config_.timeout_s)) return;
  const std::string& name = running.decision.names.front();
  const std::vector<int> late = running.team->laggards();
  const std::string text = "'" + name + "' has run for " + whole(lasted) + " s and still waits for ranks " + list(late);
  if (lasted > config_.timeout_s) throw Timeout(text + ", more than SORDINO_TIMEOUT_S", name, late);
  if (running.warned) return;
  running.warned = true;
  std::cerr << "sordino: stalled: " + text + ".\n" << std::flush;
}

void World::watch_coordinated(ProcessSet& set, Time now) {
  for (const Negotiation::Waiting& waiting : set.negotiation->waiting()) {
    const double waited = seconds(waiting.since, now);
    if (waiting.kind == Kind::kJoin) continue;  // the others train on, for as long as they have data
    if (waiting.missing.empty() || waited < std::min(config_.stall_warn_s, config_.timeout_s)) continue;
    const std::string text = std::string(name_of(waiting.kind)) + " '" + waiting.name + "' has waited " +
                             whole(waited) + " s for ranks " + list(waiting.missing);
    if (waited > config_.timeout_s) {
      stuck_ = waiting.missing;
      throw Timeout(text + ", more than SORDINO_TIMEOUT_S", waiting.name, waiting.missing);
    }
    if (!waiting.warned) {
      std::cerr << "sordino: stalled: " + text + ". They compute long, wait for something else, or never call it.\n"
                << std::flush;
      set.negotiation->mark_warned(waiting.name);
      post_to_members(set, Writer().put(Message::kStalled).put(set.id).put(waiting.name).take());
    }
  }
}

// What another rank coordinates fails here too when that rank stays silent or has left.
void World::watch_own(Time now) {
  constexpr double kGrace = 2;  // the coordinator names the missing ranks better, so it goes first
  std::vector<Submission> deserted;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, submission] : outstanding_) {
      if (!submission.handle) continue;
      const ProcessSet& set = *sets_.at(submission.request.set);
      const int coordinator = set.coordinator();
      if (set.running || !set.decisions.empty() || coordinator == rank()) continue;
      if (gone_[static_cast<std::size_t>(coordinator)]) deserted.push_back(submission);
      if (submission.request.kind == Kind::kJoin) continue;
      const bool reported = submission.warned || set.stalled.contains(submission.request.name);
      if (!reported && seconds(submission.since, now) > config_.stall_warn_s + kGrace) {
        submission.warned = true;
        std::cerr << "sordino: stalled: '" + submission.request.name + "' has waited " +
                         whole(seconds(submission.since, now)) + " s for rank " + std::to_string(coordinator) +
                         ", which coordinates it and says nothing.\n"
                  << std::flush;
      }
      if (seconds(submission.since, now) > config_.timeout_s + kGrace) {
        stuck_ = {coordinator};
        throw Timeout("'" + submission.request.name + "' has waited for " + whole(config_.timeout_s) + " s, and rank " +
                          std::to_string(coordinator) + ", which coordinates it, says nothing",
                      submission.request.name, {coordinator});
      }
    }
  }
  for (Submission& submission : deserted) {
    const int coordinator = sets_.at(submission.request.set)->coordinator();
    finish(submission, std::make_exception_ptr(PeerLost("'" + submission.request.name + "' waits for rank " +
                                                            std::to_string(coordinator) + ", which has shut down",
                                                        {coordinator})));
  }
}

void World::fail(std::exception_ptr failure, bool tell) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
  }
  broken_ = tell || told_;
  if (broken_) transport_->abandon();
  if (tell && membership_) {
    tell_membership(failure);
  } else if (tell) {
    tell_peers(failure);
  }
  std::vector<Submission> lost;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, submission] : outstanding_) {
      if (submission.handle) lost.push_back(submission);
    }
    for (Submission& submission : submitted_) lost.push_back(submission);
    submitted_.clear();
  }
  for (auto& [id, set] : sets_) {
    // Transfers may still be under way into memory that a task owns, so the task outlives the failure.
    if (set->running) graveyard_.push_back(std::move(*set->running));
    set->running.reset();
    set->decisions.clear();
  }
  for (const Flying& one : flying_) {
    for (const auto& handle : one.handles) handle->undone = broken_.load();
  }
  for (Submission& submission : lost) finish(submission, failure);
  for (auto& [number, service] : services_) service->end(failure);
  if (!broken_) return;
  // All at once: an abort may wait for what another communicator still has on the device.
  std::vector<std::thread> aborts;
  for (auto& [id, set] : sets_) {
    for (auto& [key, channel] : set->channels) aborts.emplace_back([&channel] { channel->communicator().abort(); });
  }
  for (std::thread& abort : aborts) abort.join();
  flying_.clear();
}

void World::tell_peers(const std::exception_ptr& failure) {
  Writer writer;
  writer.put(Message::kFailed);
  try {
    std::rethrow_exception(failure);
  } catch (const PeerLost& error) {
    writer.put(Failure::kPeerLost).put(std::string(error.what())).put(std::string()).put(error.ranks);
  } catch (const Timeout& error) {
    writer.put(Failure::kTimeout).put(std::string(error.what())).put(error.operation).put(error.missing);
  } catch (const std::exception& error) {
    writer.put(Failure::kOther).put(std::string(error.what())).put(std::string()).put(std::vector<int>{rank()});
  }
  const Bytes message = writer.take();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank() || gone_[static_cast<std::size_t>(peer)]) continue;
    try {
      transport_->post(peer, message);
    } catch (const Error&) {
      // The peer is the one that died; the others still have to hear of it.
    }
  }
}

// Any failure ends the epoch: who is left agrees on the next one.
void World::tell_membership(const std::exception_ptr& failure) {
  std::vector<int> lost, stuck;
  std::string cause;
  try {
    std::rethrow_exception(failure);
  } catch (const PeerLost& error) {
    cause = error.what();
    for (const int peer : error.ranks) lost.push_back(member(peer));
  } catch (const std::exception& error) {
    cause = error.what();
  }
  for (const int peer : stuck_) stuck.push_back(member(peer));
  membership_->blame(lost, stuck, cause);
}

// Ends what NCCL has on the device for one communicator.
void World::land(const std::shared_ptr<nccl::Channel>& channel) {
  for (const Flying& one : flying_) {
    if (one.channel != channel) continue;
    for (const auto& handle : one.handles) handle->undone = true;
  }
  std::erase_if(flying_, [&](const Flying& one) { return one.channel == channel; });
  for (auto& [id, set] : sets_) {
    std::erase_if(set->channels, [&](const auto& entry) { return entry.second == channel; });
  }
  channel->communicator().abort();
}

}  // namespace sordino
