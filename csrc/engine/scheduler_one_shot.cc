// One-shot all-reduces, which need no negotiation (collectives/one_shot.h): when a rank may publish, and when it
// declines.
#include <algorithm>

#include "engine/control.h"
#include "engine/scheduler.h"

namespace sordino {
namespace {

// Longest wait of other ranks for a rank that is not in the library. Then the operation is done the usual way, which
// reports stalls and losses.
constexpr std::chrono::milliseconds kPatience{10};

void ring_resting(Transport& transport, ProcessSet& set) {
  set.one_shot()->wake([&](int member) { transport.ring(set.ranks[static_cast<std::size_t>(member)]); });
}

}  // namespace

std::shared_ptr<ProcessSet> Scheduler::enter(int id, std::string_view name, const OneShot::What& what,
                                             const std::byte* input) {
  if (common_.failure.latched() || common_.trace.on()) return nullptr;
  const auto found = sets_.find(id);
  if (found == sets_.end()) return nullptr;
  ProcessSet& set = *found->second;
  if (set.entered) return nullptr;  // by another thread, or by the call that a signal handler has interrupted
  OneShot* shot = set.one_shot();
  if (!shot || shot->closed() || !shot->free()) return nullptr;
  const OneShot::Number number = shot->number_of(name, what);
  if (number == 0 || has_submitted(set, name)) return nullptr;
  shot->enter(number, what, input);
  set.entered = {name, std::chrono::steady_clock::now(), common_.clock.now()};
  ring_resting(common_.transport, set);
  return found->second;
}

bool Scheduler::collect(ProcessSet& set, const OneShot::What& what, const std::byte* input, std::byte* output) {
  OneShot& shot = *set.one_shot();
  set.entered.reset();
  const bool done = shot.take(what, input, output);
  // Transports whose messages ring no bell are polled for unsent messages anyway (World::work).
  if (shot.relays() && common_.transport.rings_always()) posting_ = !common_.transport.idle();
  if (!done) return false;
  const std::vector<int>& here = shot.members_of_node();
  common_.traffic.count_all_reduce(what.bytes(), here.size(), shot.place(),
                                   [&](std::size_t place) { return set.ranks[static_cast<std::size_t>(here[place])]; });
  common_.traffic.operations.fetch_add(1);
  common_.traffic.one_shot.fetch_add(1);
  return true;
}

void Scheduler::give_up_entered(ProcessSet& set) {
  set.entered.reset();
  set.one_shot()->abandon();
}

// The set is about to be removed. All ranks announce that before the first of them removes it.
void Scheduler::abandon_one_shots(int set) {
  const auto found = sets_.find(set);
  if (found == sets_.end()) return;
  if (OneShot* shot = found->second->one_shot()) shot->abandon();
}

// True if this rank waits for the others in the usual way: for this operation, or for all of theirs (join).
bool Scheduler::has_submitted(const ProcessSet& set, std::string_view name) const {
  if (set.in_flight.load() == 0) return false;
  std::lock_guard lock(mutex_);
  const std::string key = key_of(set.id, kAllreduceLabel);
  if (name != kUnnamed && outstanding_.contains(key + std::string(name))) return true;
  return std::any_of(outstanding_.begin(), outstanding_.end(), [&](const auto& entry) {
    return (name == kUnnamed && entry.first.starts_with(key + std::string(kUnnamed))) ||
           (entry.second.handle && collective(entry.second.request.opcode).effect == Effect::kJoins &&
            entry.second.request.set == set.id);
  });
}

bool Scheduler::must_decline(ProcessSet& set, const std::vector<OneShot::Number>& awaited, Time now) const {
  if (!set.awaited_since) set.awaited_since = now;
  return set.one_shot()->closed() || now - *set.awaited_since >= kPatience ||
         std::any_of(awaited.begin(), awaited.end(),
                     [&](OneShot::Number number) { return has_submitted(set, set.one_shot()->name_of(number)); });
}

bool Scheduler::decline(Time now) {
  bool declined = false, awaited_any = false;
  for (auto& [id, set] : sets_) {
    OneShot* shot = set->one_shot();
    if (!shot) continue;
    const std::vector<OneShot::Number> awaited = shot->awaited();
    if (!awaited.empty() && !must_decline(*set, awaited, now)) {
      awaited_any = true;
      continue;
    }
    set->awaited_since.reset();
    if (awaited.empty()) continue;
    shot->decline();
    ring_resting(common_.transport, *set);
    declined = true;
  }
  awaited_ = awaited_any;
  return declined;
}

bool Scheduler::relay(Time now) {
  bool moved = false;
  for (auto& [id, set] : sets_) {
    OneShot* shot = set->one_shot();
    if (!shot || !shot->advance(now)) continue;
    ring_resting(common_.transport, *set);
    moved = true;
  }
  if (posting_.load() && common_.transport.idle()) posting_ = false;
  return moved;
}

}  // namespace sordino
