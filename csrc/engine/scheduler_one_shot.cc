// Turns, in which operations are repeated without a negotiation (collectives/one_shot.h): when a rank enters, when it
// declines, and what follows. A rank enters from a call that waits for a small operation (World::repeat), or for a
// submission:
//
//   agreed, small           the result is there
//   agreed, in two turns    this rank has entered the second one, which has the same outcome on all ranks
//   agreed, larger          it runs next, before decisions that arrived meanwhile
//   not agreed              a submission is announced like a new one; a call submits its operation
//
// A small operation needs no place in the order of the set's operations, so others may be in flight. A larger one is
// entered only if nothing else of this rank is in flight on the set. Then every other operation is decided either
// before all ranks enter the larger one or after it: a decision needs the announcements of all.
#include <algorithm>
#include <numeric>

#include "engine/control.h"
#include "engine/scheduler.h"

namespace sordino {
namespace {

// Longest wait of other ranks for a rank that is not in the library. After it, the operation is negotiated, which
// reports stalls and losses.
constexpr std::chrono::milliseconds kPatience{10};
// Longest wait for a rank that has other operations in flight, if the entered one needs a place in the order. The other
// operations may be about to end, or may need a rank that has entered.
constexpr std::chrono::microseconds kPatienceOfBusy{200};

void ring_resting(Transport& transport, ProcessSet& set) {
  set.one_shot()->wake([&](int member) { transport.ring(set.ranks[static_cast<std::size_t>(member)]); });
}

}  // namespace

std::shared_ptr<const Repeat> Scheduler::find(int id, std::string_view name, const Signature& what) {
  const auto found = sets_.find(id);
  if (found == sets_.end()) return nullptr;
  // A rank that is alone in its set knows all operations. For a run record it submits them, to record their spans.
  if (found->second->ranks.size() == 1 && common_.ledger.keeps_spans()) return nullptr;
  OneShot* shot = found->second->one_shot();
  return shot && !shot->closed() ? shot->find(name, what) : nullptr;
}

std::shared_ptr<ProcessSet> Scheduler::enter_call(int id, const std::shared_ptr<const Repeat>& repeat,
                                                  const std::byte* input, const std::byte* output) {
  if (common_.failure.latched() || common_.trace.on()) return nullptr;
  const auto found = sets_.find(id);
  if (found == sets_.end() || found->second->entered) return nullptr;  // by another thread, or by an interrupted call
  ProcessSet& set = *found->second;
  OneShot* shot = set.one_shot();
  if (!shot || shot->closed() || !shot->free() || set.refused == repeat || has_submitted(set, repeat->name) ||
      (repeat->in_two_turns() && common_.peers.tolerates_losses()))
    return nullptr;
  enter_turn(set, repeat, "", input, output);
  return found->second;
}

// Enters a turn for a submission that is not outstanding yet, if possible. Returns whether it has. With mutex_ held.
bool Scheduler::enter_submission(ProcessSet& set, const Submission& submission) {
  const Request& request = submission.request;
  if (!repeats_submissions_ || !collective(request.opcode).repeats || request.device || set.entered ||
      common_.trace.on() || common_.ledger.keeps_spans())
    return false;
  OneShot* shot = set.one_shot();
  if (!shot || shot->closed() || !shot->free()) return false;
  const std::string_view name = name_of_repeats(request.name);
  const auto repeat = shot->find(name, Signature::of(request));
  if (!repeat || set.take_refused(repeat) || (!repeat->carried() && set.in_flight.load() > 1) ||
      has_announced(set, name) || (repeat->in_two_turns() && common_.peers.tolerates_losses()))
    return false;
  const Tensor* tensor = request.tensors.empty() ? nullptr : &request.tensors[0];
  enter_turn(set, repeat, request.name, tensor ? tensor->input : nullptr, tensor ? tensor->output : nullptr);
  shot->rest(true);
  return true;
}

void Scheduler::enter_turn(ProcessSet& set, std::shared_ptr<const Repeat> repeat, std::string name,
                           const std::byte* input, const std::byte* output) {
  // An unnamed submission has used up a number of its rank, and a waiting call has not. So their entries must differ.
  const bool numbered = is_unnamed(repeat->name) && !name.empty();
  const Entry entry{repeat->number << 1 | static_cast<std::uint64_t>(numbered), repeat->carried() ? 0 : set.sequence()};
  set.one_shot()->enter(repeat, entry, input, output);
  set.awaited_since.reset();
  Counted counted = repeat->in_two_turns() ? Counted(in_two_turns_) : Counted();
  set.entered = {std::move(repeat), std::move(name), common_.clock.now(), false, std::move(counted)};
  ring_resting(common_.transport, set);
}

Scheduler::Collected Scheduler::collect(ProcessSet& set, const std::byte* input, std::byte* output) {
  ProcessSet::InTurn turn = std::move(*set.entered);
  const bool agreed = close_turn(set), failed = common_.failure.latched();
  // In two turns, ranks use each other's memory. A rank of a failed world must not.
  if (!agreed || (failed && turn.repeat->in_two_turns())) {
    if (failed) set.one_shot()->abandon();
    set.refused = std::move(turn.repeat);
    return Collected::kNothing;
  }
  return deliver(set, std::move(turn), input, output) ? Collected::kAll : Collected::kHalf;
}

// Writes the result of an operation after a turn that ranks have agreed in. Returns false if this rank has entered the
// operation's second turn instead.
bool Scheduler::deliver(ProcessSet& set, ProcessSet::InTurn&& turn, const std::byte* input, std::byte* output) {
  OneShot& shot = *set.one_shot();
  bool all = false;
  try {
    all = shot.deliver(*turn.repeat, input, output);
  } catch (const MemoryGone& error) {
    shot.abandon();
    throw_lost(turn.repeat->name, error);
  } catch (...) {
    shot.abandon();
    throw;
  }
  if (all) {
    count_repeat(set, *turn.repeat);
    return true;
  }
  turn.awaited_since = common_.clock.now();
  turn.warned = false;
  set.entered = std::move(turn);
  ring_resting(common_.transport, set);
  return false;
}

bool Scheduler::close_turn(ProcessSet& set) {
  OneShot& shot = *set.one_shot();
  const bool agreed = shot.close();
  set.entered.reset();
  // Transports whose messages ring no doorbell are polled for unsent messages anyway (World::work).
  if (shot.relays() && common_.transport.rings_always()) posting_ = !common_.transport.idle();
  return agreed;
}

void Scheduler::count_repeat(ProcessSet& set, const Repeat& repeat) {
  const Recipe& recipe = repeat.recipe;
  if (repeat.what.opcode == Opcode::kAllreduce) {
    const std::vector<int>& here = set.one_shot()->members_of_node();
    common_.traffic.count_all_reduce(recipe.published, here.size(), set.one_shot()->place(), [&](std::size_t place) {
      return set.ranks[static_cast<std::size_t>(here[place])];
    });
  } else {
    // Messages of leaders to other nodes are counted where they are sent.
    for (const int member : set.one_shot()->members_of_node()) {
      const auto index = static_cast<std::size_t>(member);
      if (member != set.me && recipe.gives[index] > 0)
        common_.traffic.count(common_.transport, set.ranks[index], recipe.gives[index]);
    }
  }
  common_.traffic.operations.fetch_add(1);
  common_.traffic.one_shot.fetch_add(1);
}

void Scheduler::give_up_entered(ProcessSet& set) {
  set.entered.reset();
  set.one_shot()->abandon();
}

void Scheduler::withdraw() {
  for (auto& [id, set] : sets_) {
    OneShot* shot = set->one_shot();
    if (!set->entered || set->entered->name.empty() || shot->over() || shot->in_vain() || !shot->withdraw()) continue;
    shot->rest(false);
    set->entered.reset();
    ring_resting(common_.transport, *set);
  }
}

bool Scheduler::end_turns() {
  bool ended = false;
  for (auto& [id, set] : sets_) {
    if (!set->entered || set->entered->name.empty()) continue;
    if (!set->one_shot()->over() && !set->one_shot()->in_vain()) continue;
    end_turn(*set);
    ended = true;
  }
  return ended;
}

void Scheduler::end_turn(ProcessSet& set) {
  OneShot& shot = *set.one_shot();
  ProcessSet::InTurn turn = std::move(*set.entered);
  const auto repeat = turn.repeat;
  Submission submission;
  {
    std::lock_guard lock(mutex_);
    submission = outstanding_.at(key_of(set.id, turn.name));
  }
  shot.rest(false);
  if (!close_turn(set)) {
    // Nothing of a first turn remains.
    submission.handle->results.clear();
    submission.handle->rows.clear();
    {
      std::lock_guard lock(mutex_);
      note_announced(set, outstanding_.at(key_of(set.id, submission.request.name)));
    }
    return announce(set, announcement_of(submission.request));
  }
  if (!repeat->carried()) {
    Decision& decision = set.decisions.emplace_front();
    decision.names = {submission.request.name};
    decision.participants.resize(set.ranks.size());
    std::iota(decision.participants.begin(), decision.participants.end(), 0);
    decision.merged = repeat->merged;
    decision.repeated = true;
    return;
  }
  const Tensor tensor = submission.request.tensors.empty() ? Tensor{} : submission.request.tensors[0];
  const std::size_t bytes = repeat->recipe.result_bytes();
  // The output was made for an earlier repeat, which may have had another shape.
  const bool fits =
      !collective(submission.request.opcode).rows_may_differ || (bytes > 0 && tensor.output_bytes == bytes);
  std::byte* output = fits ? tensor.output : nullptr;
  if (!output && !submission.request.tensors.empty()) {
    std::vector<Result>& results = submission.handle->results;
    if (results.empty()) results.push_back(host_result(repeat->recipe.shape, bytes));  // else made in the first turn
    output = results.back().data.get();
  }
  submission.handle->rows = repeat->recipe.rows;
  if (deliver(set, std::move(turn), tensor.input, output)) {
    finish(submission, nullptr);
  } else {
    shot.rest(true);
  }
}

// True if this rank has submitted this operation, or has joined. Then it waits for other ranks through the coordinator.
bool Scheduler::has_submitted(const ProcessSet& set, std::string_view name) const {
  if (set.in_flight.load() == 0) return false;
  std::lock_guard lock(mutex_);
  return outstanding_.contains(key_of(set.id, std::string(name))) || has_announced(set, name);
}

// As has_submitted(), but counts announced submissions only. With mutex_ held.
bool Scheduler::has_announced(const ProcessSet& set, std::string_view name) const {
  return set.joins > 0 || set.announced.contains(name);
}

bool Scheduler::must_decline(ProcessSet& set, const std::vector<OneShot::Number>& awaited, Time now) const {
  if (!set.awaited_since) set.awaited_since = now;
  const OneShot& shot = *set.one_shot();
  const Time::duration waited = now - *set.awaited_since;
  return shot.closed() || waited >= kPatience ||
         std::any_of(awaited.begin(), awaited.end(), [&](OneShot::Number number) {
           const auto repeat = shot.find(number >> 1);
           if (!repeat || set.in_flight.load() == 0) return false;
           std::lock_guard lock(mutex_);
           return has_announced(set, repeat->name) || (!repeat->carried() && waited >= kPatienceOfBusy);
         });
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
    if (const auto repeat = shot->find(awaited.front() >> 1)) set->refused = repeat;
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
