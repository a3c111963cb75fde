// The scheduler's functions for users, process sets, and the ends of operations.
#include "engine/scheduler.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include "base/keep.h"
#include "engine/control.h"

namespace sordino {
namespace {

bool has_idle_devices(const ProcessSet& set) { return !set.devices.barrier || set.devices.barrier->idle(); }

}  // namespace

Scheduler::Scheduler(Common& common, const Config& config, int patience)
    : common_(common),
      set_options_{common.transport.shares_memory() ? config.chunk_bytes : 0, patience, config.fusion_bytes,
                   std::make_shared<GivenIds>()},
      repeats_submissions_(!config.survive_losses),
      device_routes_(common.transport, config),
      device_in_flight_(common.transport.rank(), config.stall_warn_s, config.timeout_s),
      staging_(common.transport.node_memory()) {
  std::vector<int> all_ranks(static_cast<std::size_t>(common.transport.size()));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  add_set(0, std::move(all_ranks));
}

std::shared_ptr<Handle> Scheduler::submit(Request request) {
  auto handle = std::make_shared<Handle>();
  std::lock_guard lock(mutex_);
  if (common_.failure.latched()) common_.failure.rethrow();  // end() runs before this or sees this submission
  const auto found = sets_.find(request.set);
  if (found == sets_.end())
    throw UsageError("process set " + std::to_string(request.set) + " does not exist, or not any more");
  if (found->second->me < 0) {
    throw UsageError("rank " + std::to_string(common_.transport.rank()) + " is not a member of process set " +
                     std::to_string(request.set));
  }
  if (removing_.contains(request.set)) {
    throw UsageError("process set " + std::to_string(request.set) + " is being removed, so '" + request.name +
                     "' cannot start on it");
  }
  const bool removes = collective(request.opcode).effect == Effect::kRemovesSet;
  if (removes) require_idle(request.set_change.removed);
  const auto [place, added] = outstanding_.try_emplace(key_of(request.set, request.name));
  if (!added) {
    throw UsageError("an operation named '" + request.name +
                     "' is still under way on this rank; wait for it, or give this one another name");
  }
  if (removes) removing_.insert(request.set_change.removed);
  if (in_flight_.fetch_add(1) == 0 && common_.ledger.open_now()) common_.ledger.busy(std::chrono::steady_clock::now());
  found->second->in_flight.fetch_add(1);
  if (request.device) on_devices_.fetch_add(1);
  request.runs_ahead = request.device && request.device->waits_for_words() && !common_.peers.tolerates_losses();
  handle->submitted = true;
  submitted_.push_back({std::move(request), handle, std::chrono::steady_clock::now(), common_.clock.now()});
  submitted_any_ = true;
  return handle;
}

void Scheduler::require_idle(int set) const {
  const std::string prefix = key_of(set, "");
  for (const auto& [key, submission] : outstanding_) {
    if (!key.starts_with(prefix)) continue;
    throw UsageError("process set " + std::to_string(set) + " cannot be removed while '" + key.substr(prefix.size()) +
                     "' is under way on it");
  }
}

std::vector<int> Scheduler::members(int set) const {
  std::lock_guard lock(mutex_);
  const auto found = sets_.find(set);
  if (found == sets_.end()) throw UsageError("process set " + std::to_string(set) + " does not exist, or not any more");
  return found->second->ranks;
}

std::vector<int> Scheduler::set_ids() const {
  std::lock_guard lock(mutex_);
  std::vector<int> ids;
  for (const auto& [id, set] : sets_) ids.push_back(id);
  return ids;
}

std::vector<std::string> Scheduler::names_in_flight() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [key, submission] : outstanding_) names.push_back(key.substr(key.find('/') + 1));
  return names;
}

std::string Scheduler::operation_of(const Handle& handle) const {
  if (!handle.submitted) return "";
  std::lock_guard lock(mutex_);
  for (const auto& [key, submission] : outstanding_) {
    if (submission.handle.get() == &handle) return submission.request.name;
  }
  for (const Submission& submission : submitted_) {
    if (submission.handle.get() == &handle) return submission.request.name;
  }
  return "an operation that has just ended";
}

std::map<std::string, std::uint64_t> Scheduler::routes() const {
  std::lock_guard lock(mutex_);
  return routes_;
}

ProcessSet& Scheduler::add_set(int id, std::vector<int> ranks) {
  auto made = std::make_shared<ProcessSet>(id, std::move(ranks), common_.transport, common_.traffic, set_options_);
  ProcessSet& set = *made;
  {
    std::lock_guard lock(mutex_);
    sets_[id] = std::move(made);
  }
  if (const Location block = set.block_location(); block.segment != 0) {
    const Bytes message = Writer().put(Message::kSharedBlock).put(id).put(block).take();
    for (const int peer : set.node_peers()) common_.transport.post(peer, message);
  }
  made_.insert(id);
  for (const int peer : set.ranks) {
    if (common_.peers.gone(peer)) tell_left(set, peer);
  }
  for (Early& early : std::exchange(early_, {})) receive(early.from, early.message);
  return set;
}

void Scheduler::remove_set(int id) {
  std::shared_ptr<ProcessSet> removed;
  {
    std::lock_guard lock(mutex_);
    const auto found = sets_.find(id);
    if (found == sets_.end()) return;
    removed = std::move(found->second);
    sets_.erase(found);
  }
  common_.removed_sets.insert(id);
  if (OneShot* shot = removed->one_shot()) shot->abandon();
  if (removed->block() || removed->devices.tried)
    removed_.push_back({id, removed, removed->devices.barrier, removed->block(), removed->node_peers()});
}

void Scheduler::release_blocks() {
  for (RemovedSet& removed : removed_) {
    if (removed.set && has_idle_devices(*removed.set)) removed.set = nullptr;
    if (removed.set || removed.told || !removed.barrier.expired()) continue;
    common_.peers.post_to(removed.peers, Writer().put(Message::kReleased).put(removed.id).take());
    removed.told = true;
  }
  std::erase_if(removed_, [this](RemovedSet& removed) {
    if (!removed.told) return false;
    bool by_all = true;
    for (const int peer : removed.peers) {
      if (released_[removed.id].contains(peer)) continue;
      if (!common_.peers.gone(peer)) return false;
      by_all = false;
    }
    if (!by_all && removed.block) common_.transport.keep(std::move(removed.block));
    released_.erase(removed.id);
    return true;
  });
}

void Scheduler::note_left(int rank) {
  for (auto& [id, set] : sets_) tell_left(*set, rank);
}

void Scheduler::tell_left(ProcessSet& set, int rank) {
  const int index = set.index_of(rank);
  if (index >= 0) set.note_left(index, common_.peers.departure(rank));
}

bool Scheduler::settled() const {
  return std::all_of(sets_.begin(), sets_.end(), [](const auto& entry) {
    const ProcessSet& set = *entry.second;
    const bool in_turn = set.entered && !set.entered->name.empty();
    return !set.running && set.decisions.empty() && !in_turn;
  });
}

// ---- ends ----------------------------------------------------------------------------------------------------------

void Scheduler::finish(Submission& submission, std::exception_ptr error) {
  {
    std::lock_guard lock(mutex_);
    const auto ended = outstanding_.extract(key_of(submission.request.set, submission.request.name));
    if (collective(submission.request.opcode).effect == Effect::kRemovesSet)
      removing_.erase(submission.request.set_change.removed);
    if (in_flight_.fetch_sub(1) == 1 && common_.ledger.open_now())
      common_.ledger.idle(std::chrono::steady_clock::now());
    if (const auto found = sets_.find(submission.request.set); found != sets_.end()) {
      ProcessSet& set = *found->second;
      set.in_flight.fetch_sub(1);
      if (ended && ended.mapped().announced) {
        const auto name = set.announced.find(name_of_repeats(submission.request.name));
        if (--name->second == 0) set.announced.erase(name);
        set.joins -= collective(submission.request.opcode).effect == Effect::kJoins;
      }
    }
    if (submission.request.device) on_devices_.fetch_sub(1);
  }
  submission.handle->finish(std::move(error));
}

void Scheduler::give_up(ProcessSet& set, const std::exception_ptr& error) {
  Running& over = given_up_.emplace_back(std::move(*set.running));
  over.participants->note_given_up();
  set.running.reset();
  if (over.channel) {
    device_in_flight_.give_up(*over.channel);
    for (auto& [id, other] : sets_)
      std::erase_if(other->channels, [&](const auto& entry) { return entry.second == over.channel; });
    over.channel->communicator().abort();
  }
  for (Submission& submission : over.submissions) {
    if (const auto& device = submission.request.device) {
      submission.handle->device = device;
      submission.handle->event =
          device->record(over.queue ? *over.queue : device->queue());  // the device may still work on the tensors
    }
    submission.handle->given_up = true;
    finish(submission, error);
  }
}

void Scheduler::give_up(ProcessSet& set, const PeerLost& error) {
  const Participants& over = *set.running->participants;
  const Bytes message = Writer()
                            .put(Message::kGaveUp)
                            .put(set.id)
                            .put(over.sequence)
                            .put(std::string(error.what()))
                            .put(error.ranks)
                            .take();
  common_.peers.post_to(over.ranks, message);
  give_up(set, std::make_exception_ptr(error));
}

// If this rank has already ended the operation, nothing is left to do. If it has not begun it, execute() will fail it.
void Scheduler::hear_of_given_up(ProcessSet& set, std::uint64_t sequence, const PeerLost& error) {
  if (!common_.peers.tolerates_losses()) throw error;
  if (set.running && set.running->participants->sequence == sequence) {
    give_up(set, std::make_exception_ptr(error));
  } else if (sequence > set.sequence()) {
    set.given_up.try_emplace(sequence, error);
  }
}

void Scheduler::end(const std::exception_ptr& failure, bool broken) {
  refuse_decided();
  std::vector<Submission> lost;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, submission] : outstanding_) {
      if (submission.handle) lost.push_back(submission);
    }
    for (Submission& submission : submitted_) lost.push_back(submission);
    submitted_.clear();
  }
  removals_.clear();  // they are outstanding, too
  for (auto& [id, set] : sets_) {
    if (set->entered && !set->entered->name.empty()) give_up_entered(*set);
    // Transfers may still be under way into memory that a task or a caller owns, so both have to survive the failure.
    if (set->running) {
      set->running->participants->note_given_up();
      for (Submission& submission : set->running->submissions) {
        if (submission.handle) submission.handle->given_up = true;
      }
      given_up_.push_back(std::move(*set->running));
    }
    set->running.reset();
    set->decisions.clear();
  }
  if (broken) device_in_flight_.give_up();  // before any waiting thread sees the failure
  for (Submission& submission : lost) finish(submission, failure);
}

// An operation that was refused before the failure fails with the refusal on all ranks, because the refusal may be the
// cause: a rank that raised it may have ended.
void Scheduler::refuse_decided() {
  for (auto& [id, set] : sets_) {
    for (const Decision& decision : set->decisions) {
      if (decision.verdict == Verdict::kRun) continue;
      std::vector<Submission> refused;
      {
        std::lock_guard lock(mutex_);
        for (const std::string& name : decision.names) {
          const auto found = outstanding_.find(key_of(set->id, name));
          if (found != outstanding_.end() && found->second.handle) refused.push_back(found->second);
        }
      }
      refuse(decision, refused);
    }
  }
}

void Scheduler::abort_devices() {
  device_in_flight_.give_up();
  // In parallel threads: an abort may wait for work that another communicator still has on the device.
  std::vector<std::thread> aborts;
  for (const RemovedSet& removed : removed_) {
    if (const auto barrier = removed.barrier.lock()) barrier->abandon();
  }
  for (auto& [id, set] : sets_) {
    if (set->devices.barrier) set->devices.barrier->abandon();
    for (auto& [key, channel] : set->channels) aborts.emplace_back([&channel] { channel->communicator().abort(); });
  }
  for (std::thread& abort : aborts) abort.join();
  device_in_flight_.clear();
}

bool Scheduler::devices_idle() {
  return std::all_of(sets_.begin(), sets_.end(), [](const auto& entry) { return has_idle_devices(*entry.second); }) &&
         std::all_of(removed_.begin(), removed_.end(),
                     [](const RemovedSet& removed) { return !removed.set || has_idle_devices(*removed.set); });
}

void Scheduler::close_nccl() {
  device_in_flight_.clear();
  for (auto& [id, set] : sets_) set->channels.clear();
}

void Scheduler::leave_blocks() {
  for (auto& [id, set] : sets_) set->leave_block();
  for (RemovedSet& removed : removed_) {
    if (removed.block) common_.transport.keep(std::move(removed.block));
  }
}

void Scheduler::keep_given_up() {
  for (Running& running : given_up_) running.barrier = nullptr;  // belongs to the set and is destroyed with it
  leak_intentionally(std::move(given_up_));
}

}  // namespace sordino
