#include "engine/failure_detector.h"

#include "base/log.h"
#include "engine/control.h"
#include "engine/telling.h"

namespace sordino {
namespace {

PeerLost deserted(const std::string& operation, int rank, const Peers& peers) {
  const Departure& departure = peers.departure(rank);
  return PeerLost("'" + operation + "', which has begun, waits for " + departure.text, departure.lost);
}

}  // namespace

void FailureDetector::warn(std::string text) const {
  log::say(log::Level::kWarning, common_.transport.rank(), std::move(text));
}

// ---- watching ------------------------------------------------------------------------------------------------------

void FailureDetector::watch(AwakeTime now) {
  if (membership_) note_waits(now);
  watch_losses();
  for (auto& [id, set] : scheduler_.sets()) {
    if (set->running) watch_set(*set, now);
    if (set->entered) watch_entered(*set, now);
    if (set->negotiation) watch_coordinated(*set, now);
  }
  scheduler_.device_in_flight().check(now);
  watch_own(now);
  if (messages_.busy()) watch_messages(now);
}

void FailureDetector::watch_losses() {
  const std::vector<Loss> losses = common_.transport.take_losses();
  if (losses.empty()) return;
  common_.transport.poll(receive_);  // a rank may have sent a goodbye just before its end
  for (const Loss& loss : losses) {
    if (common_.peers.gone(loss.rank)) continue;
    if (common_.peers.tolerates_losses()) {
      lose(loss.rank, loss.cause, loss.certain);
      continue;
    }
    throw PeerLost(
        "rank " + std::to_string(loss.rank) + " on " + common_.transport.host_of(loss.rank) + " is lost: " + loss.cause,
        {loss.rank});
  }
}

void FailureDetector::lose(int rank, const std::string& why, bool certain) {
  if (common_.peers.gone(rank)) return;
  warn("rank " + std::to_string(rank) + " on " + common_.transport.host_of(rank) + " is lost: " + why + ". Rank " +
       std::to_string(common_.transport.rank()) + " continues without it.");
  common_.transport.abandon();
  note_left(rank, certain, "is lost", ": " + why);
}

void FailureDetector::note_left(int rank, bool certain, const std::string& how, const std::string& cause,
                                std::vector<int> lost) {
  common_.peers.note_left(rank, how, cause, std::move(lost));
  if (membership_ && certain) membership_->left(view_.members[static_cast<std::size_t>(rank)]);
  scheduler_.note_left(rank);
  services_.lost(rank);
  messages_.lost(rank);
}

void FailureDetector::watch_set(ProcessSet& set, AwakeTime now) {
  if (set.running->first().serving) return end_serving(set);
  try {
    watch_running(set, *set.running, now);
  } catch (const PeerLost& error) {
    if (!common_.peers.tolerates_losses()) throw;
    scheduler_.give_up(set, error);
  }
}

void FailureDetector::watch_running(const ProcessSet& set, Running& running, AwakeTime now) const {
  if (running.dormant) running.awaited_since = now;
  const double lasted = seconds(running.awaited_since, now);
  if (lasted > 1) {
    for (const int rank : running.participants->laggards()) {
      if (common_.peers.gone(rank)) throw deserted(running.decision.names.front(), rank, common_.peers);
    }
  }
  if (!is_late(timeout_of(set), lasted)) return;
  const std::string& name = running.decision.names.front();
  const std::vector<int> late = running.participants->laggards();
  const std::string text = "'" + name + "' has run for " + whole(lasted) + " s and still waits for " + named(late);
  if (lasted > timeout_of(set)) throw Timeout(text + beyond(set.timeout_s), name, late);
  if (running.warned) return;
  running.warned = true;
  warn("stalled: " + text + ".");
}

// A rank that makes no progress at all does not decline the turn either, so this wait needs its own deadline. A second
// turn, which cannot be declined, never ends if a rank has left that should have entered it.
void FailureDetector::watch_entered(ProcessSet& set, AwakeTime now) const {
  ProcessSet::InTurn& entered = *set.entered;
  const double waited = seconds(entered.awaited_since, now);
  const std::string& name = entered.name.empty() ? entered.repeat->name : entered.name;
  if (waited > 1 && set.one_shot()->halfway() && !set.one_shot()->over()) {
    for (const int rank : set.ranks) {
      if (common_.peers.gone(rank)) throw deserted(name, rank, common_.peers);
    }
  }
  if (!is_late(timeout_of(set), waited)) return;
  std::vector<int> late;
  for (const int member : set.one_shot()->missing()) late.push_back(set.ranks[static_cast<std::size_t>(member)]);
  const std::string text = "'" + name + "' has waited " + whole(waited) + " s for " + named(late);
  if (waited > timeout_of(set)) throw Timeout(text + beyond(set.timeout_s), name, late);
  if (!std::exchange(entered.warned, true)) warn("stalled: " + text + ". No progress there.");
}

// A serving request (Request::serving) fails alone if it waits for a rank that has left. Later operations cannot begin
// without that rank.
void FailureDetector::end_serving(ProcessSet& set) {
  for (const int rank : set.running->participants->laggards()) {
    if (!common_.peers.gone(rank)) continue;
    scheduler_.give_up(set,
                       std::make_exception_ptr(deserted(set.running->decision.names.front(), rank, common_.peers)));
    return;
  }
}

void FailureDetector::watch_coordinated(ProcessSet& set, AwakeTime now) {
  for (const Negotiation::Waiting& waiting : set.negotiation->waiting()) {
    const double waited = seconds(waiting.since, now);
    const Collective& what = collective(waiting.opcode);
    if (what.effect == Effect::kJoins) continue;  // the other ranks keep training for as long as they have data
    if (waiting.missing.empty() || !is_late(timeout_of(set), waited)) continue;
    const std::string text = std::string(what.name) + " '" + waiting.name + "' has waited " + whole(waited) +
                             " s for " + named(waiting.missing);
    if (waited > timeout_of(set)) {
      stuck_ = waiting.missing;
      throw Timeout(text + beyond(set.timeout_s), waiting.name, waiting.missing);
    }
    if (!waiting.warned) {
      warn("stalled: " + text + ": still computing, waiting for something else, or never calling it.");
      set.negotiation->mark_warned(waiting.name);
      common_.peers.post_to(set.ranks, Writer().put(Message::kStalled).put(set.id).put(waiting.name).take());
    }
  }
}

// An operation that another rank coordinates fails here, too, if that rank stays silent or has left. A coordinator that
// has reported the stall is alive and will name the missing ranks itself, so it gets more time (kLongGrace): this
// rank's deadline may be shorter, or the coordinator may have been suspended for a moment.
void FailureDetector::watch_own(AwakeTime now) {
  constexpr double kGrace = 2, kLongGrace = 20;  // s; the coordinator knows the missing ranks and should report first
  std::vector<Submission> deserted;
  scheduler_.visit_announced([&](Submission& submission, const ProcessSet& set) {
    const int coordinator = set.coordinator();
    const bool in_turn = set.entered && set.entered->name == submission.request.name;  // watch_entered()
    const double waited = seconds(submission.awaited_since, now);
    if (!set.decisions.empty() && !set.ready() && waited > timeout_of(set)) {
      const std::vector<int> late(set.unconnected().begin(), set.unconnected().end());
      throw Timeout("'" + submission.request.name + "' has waited for " + brief(timeout_of(set)) +
                        " s, and its process set still waits for the memory of " + named(late),
                    submission.request.name, late);
    }
    if (set.running || !set.decisions.empty() || set.negotiation || in_turn) return;
    if (common_.peers.gone(coordinator)) deserted.push_back(submission);
    if (collective(submission.request.opcode).effect == Effect::kJoins) return;
    const bool reported = set.stalled.contains(submission.request.name);
    if (!reported && !submission.warned && waited > stall_warn_s_ + kGrace) {
      submission.warned = true;
      warn("stalled: '" + submission.request.name + "' has waited " + whole(waited) + " s for rank " +
           std::to_string(coordinator) + ", which coordinates it and is silent.");
    }
    if (waited <= timeout_of(set) + (reported ? kLongGrace : kGrace)) return;
    const std::string text = "'" + submission.request.name + "' has waited for " + brief(timeout_of(set)) +
                             " s, and rank " + std::to_string(coordinator) + ", which coordinates it, ";
    if (reported) throw Timeout(text + "has reported that other ranks are missing", submission.request.name, {});
    stuck_ = {coordinator};
    throw Timeout(text + "is silent", submission.request.name, {coordinator});
  });
  for (Submission& submission : deserted) {
    const int coordinator = scheduler_.sets().at(submission.request.set)->coordinator();
    const Departure& departure = common_.peers.departure(coordinator);
    scheduler_.finish(submission,
                      std::make_exception_ptr(
                          PeerLost("'" + submission.request.name + "' waits for " + departure.text, departure.lost)));
  }
}

void FailureDetector::watch_messages(AwakeTime now) {
  messages_.give_up_deserted(now);
  messages_.visit([&](Posting& call, const std::vector<int>& missing) {
    const double set_timeout = set_timeout_of(call);
    const double waited = seconds(call.since, now);
    if (!is_late(timeout_or_own(set_timeout), waited)) return;
    const std::string text = call.text() + " has waited " + whole(waited) + " s for " + named(missing);
    if (waited > timeout_or_own(set_timeout)) {
      if (missing.size() == 1) stuck_ = missing;
      throw Timeout(text + beyond(set_timeout), call.text(), missing);
    }
    if (std::exchange(call.warned, true)) return;
    warn("stalled: " + text +
         (call.sends ? ": still computing, or never receiving it." : ": still computing, or never sending it."));
  });
}

// Timeout of the process set of a message in s; 0: the world's, also if the set has been removed.
double FailureDetector::set_timeout_of(const Posting& call) {
  const auto found = scheduler_.sets().find(call.set);
  return found == scheduler_.sets().end() ? 0 : found->second->timeout_s;
}

// Tells the membership which waits have lasted for half of their deadline. A rank that waits for another is late, too,
// but is not at fault.
void FailureDetector::note_waits(AwakeTime now) {
  membership::Waits waits;
  const auto member = [this](int rank) { return view_.members[static_cast<std::size_t>(rank)]; };
  const auto is_long = [&](double timeout_s, AwakeTime since) { return 2 * seconds(since, now) > timeout_s; };
  for (auto& [id, set] : scheduler_.sets()) {
    if (!set->negotiation) continue;
    for (const Negotiation::Waiting& waiting : set->negotiation->waiting()) {
      if (!is_long(timeout_of(*set), waiting.since) || collective(waiting.opcode).effect == Effect::kJoins) continue;
      for (const int rank : waiting.called) {
        for (const int missing : waiting.missing) waits[member(rank)].insert(member(missing));
      }
    }
  }
  messages_.visit([&](Posting& call, const std::vector<int>& missing) {
    if (missing.size() == 1 && is_long(timeout_or_own(set_timeout_of(call)), call.since))
      waits[member(common_.transport.rank())].insert(member(missing.front()));
  });
  membership_->set_waits(std::move(waits));
}

// ---- failing -------------------------------------------------------------------------------------------------------

void FailureDetector::fail(std::exception_ptr failure, bool tell) {
  if (!common_.failure.latch(failure)) return;
  const bool broken = tell || told_;  // false: this rank shuts down in order
  if (broken) {
    common_.failure.mark_broken();
    common_.transport.abandon();
  }
  if (tell && membership_) {
    tell_membership(failure);
  } else if (tell) {
    tell_peers(failure);
  }
  scheduler_.end(failure, broken);
  services_.end(failure);
  messages_.end(failure);
  if (broken) scheduler_.abort_devices();
}

void FailureDetector::tell_peers(const std::exception_ptr& failure) {
  const int self = common_.transport.rank();
  Writer writer;
  writer.put(Message::kFailed);
  try {
    std::rethrow_exception(failure);
  } catch (const PeerLost& error) {
    writer.put(Failure::kPeerLost).put(std::string(error.what())).put(std::string()).put(error.ranks);
  } catch (const Timeout& error) {
    writer.put(Failure::kTimeout).put(std::string(error.what())).put(error.operation).put(error.missing);
  } catch (const std::exception& error) {
    writer.put(Failure::kOther).put(std::string(error.what())).put(std::string()).put(std::vector<int>{self});
  }
  const Bytes message = writer.take();
  for (int peer = 0; peer < common_.transport.size(); ++peer) {
    try {
      common_.peers.post(peer, message);
    } catch (const Error&) {
      // This peer has died. The others still need the message.
    }
  }
}

// Any failure ends the epoch. The remaining ranks then agree on the next one.
void FailureDetector::tell_membership(const std::exception_ptr& failure) {
  const auto members = [this](const std::vector<int>& ranks) {
    std::vector<int> all;
    for (const int rank : ranks) all.push_back(view_.members[static_cast<std::size_t>(rank)]);
    return all;
  };
  std::vector<int> lost;
  std::string cause;
  try {
    std::rethrow_exception(failure);
  } catch (const PeerLost& error) {
    cause = error.what();
    lost = members(error.ranks);
  } catch (const std::exception& error) {
    cause = error.what();
  }
  membership_->blame(lost, members(stuck_), cause);
}

std::vector<int> FailureDetector::read_ranks(int from, Reader& reader) const {
  std::vector<int> ranks = reader.list<int>();
  for (const int rank : ranks) {
    if (rank < 0 || rank >= common_.transport.size())
      throw TransportError("rank " + std::to_string(from) + " names a rank that does not exist");
  }
  return ranks;
}

void FailureDetector::receive_goodbye(int from, Reader& reader) {
  const std::string error = reader.text();
  const std::string cause = error.empty() ? "" : " because of " + error;
  note_left(from, true, "has shut down", cause, read_ranks(from, reader));
}

void FailureDetector::receive_failure(int from, Reader& reader) {
  if (common_.peers.tolerates_losses()) {
    reader.one_of(kLastFailure);
    return lose(from, "it has failed: " + reader.text(), true);
  }
  const auto failure = reader.one_of(kLastFailure);
  const std::string text = reader.text(), operation = reader.text();
  const std::vector<int> ranks = read_ranks(from, reader);
  told_ = true;  // a rank that fails tells all ranks
  switch (failure) {
    case Failure::kPeerLost: throw PeerLost(text, ranks);
    case Failure::kTimeout: throw Timeout(text, operation, ranks);
    case Failure::kOther: throw PeerLost("rank " + std::to_string(from) + " has failed: " + text, {from});
  }
}

}  // namespace sordino
