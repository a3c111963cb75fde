// The part of the scheduler that advances operations: announcements, messages, decisions, and data phases.
#include <algorithm>
#include <numeric>

#include "collectives/exchange.h"
#include "engine/control.h"
#include "engine/scheduler.h"

namespace sordino {
namespace {

using std::chrono::steady_clock;

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

}  // namespace

bool Scheduler::announce() {
  if (!submitted_any_.exchange(false)) return false;
  std::deque<Submission> fresh;
  {
    std::lock_guard lock(mutex_);
    fresh.swap(submitted_);
  }
  // All become outstanding before any is announced. So end() finds every handle if an announcement fails.
  std::vector<std::pair<ProcessSet*, Announcement>> said;
  {
    std::lock_guard lock(mutex_);
    for (Submission& submission : fresh) {
      ProcessSet& set = *sets_.find(submission.request.set)->second;
      const Request& request = submission.request;
      const Collective& what = collective(request.opcode);
      if (!what.negotiated) {
        std::vector<int> all_members(set.ranks.size());
        std::iota(all_members.begin(), all_members.end(), 0);
        Decision& decision = set.decisions.emplace_back();
        decision.names = {request.name};
        decision.participants = std::move(all_members);
      } else if (!enter_submission(set, submission)) {
        note_announced(set, submission);
        said.emplace_back(&set, announcement_of(request));
      }
      outstanding_[key_of(set.id, submission.request.name)] = std::move(submission);
    }
  }
  for (auto& [set, announcement] : said) announce(*set, std::move(announcement));
  return true;
}

// With mutex_ held.
void Scheduler::note_announced(ProcessSet& set, Submission& submission) {
  submission.announced = true;
  ++set.announced[std::string(name_of_repeats(submission.request.name))];
  set.joins += collective(submission.request.opcode).effect == Effect::kJoins;
}

Announcement Scheduler::announcement_of(const Request& request) const {
  Announcement mine = Announcement::of(request);
  if (collective(request.opcode).effect == Effect::kAddsSet) {
    mine.known_sets.newest = *made_.rbegin();
    for (const auto& [id, living] : sets_) mine.known_sets.ids.push_back(id);
  }
  if (const auto& device = request.device) mine.abilities = abilities(*device) | (request.runs_ahead ? kRunsAhead : 0);
  return mine;
}

void Scheduler::announce(ProcessSet& set, Announcement announcement) {
  if (set.negotiation) {
    set.negotiation->announce(set.me, std::move(announcement), common_.clock.now());
  } else {
    Writer writer;
    writer.put(Message::kAnnounce).put(set.id);
    announcement.write(writer);
    common_.transport.post(set.coordinator(), writer.take());
  }
}

bool Scheduler::decide() {
  bool decided = false;
  for (auto& [id, set] : sets_) {
    if (!set->negotiation) continue;
    for (Decision& decision : set->negotiation->decide()) {
      Writer writer;
      writer.put(Message::kDecision).put(id);
      decision.write(writer);
      common_.peers.post_to(set->ranks, writer.take());
      set->decisions.push_back(std::move(decision));
      decided = true;
    }
  }
  return decided;
}

void Scheduler::receive(int from, std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const auto message = reader.one_of(kLastMessage);
  const auto refuse_unless = [&](bool holds, const char* what) {
    if (!holds) throw TransportError("rank " + std::to_string(from) + " " + what);
  };
  const int id = reader.get<int>();
  if (!made_.contains(id)) {
    early_.push_back({from, Bytes(bytes.begin(), bytes.end())});  // its sender made the set before this rank
    return;
  }
  if (message == Message::kReleased) {  // valid whether or not this rank has removed the set
    released_[id].insert(from);
    return;
  }
  const auto found = sets_.find(id);
  if (found == sets_.end()) return;  // the set has been removed meanwhile
  ProcessSet& set = *found->second;
  const int index = set.index_of(from);
  refuse_unless(index >= 0 && set.me >= 0, "sent a message about a process set that does not include both ranks");
  switch (message) {
    case Message::kAnnounce:
      refuse_unless(set.negotiation.has_value(),
                    "announced an operation to a rank that does not coordinate its process set");
      set.negotiation->announce(index, Announcement::read(reader), common_.clock.now());
      break;
    case Message::kDecision: {
      refuse_unless(from == set.coordinator(), "sent a decision for a process set that it does not coordinate");
      Decision decision = Decision::read(reader, set.ranks.size());
      const auto& some = decision.participants;
      refuse_unless(some.empty() || (some.front() >= 0 && some.back() < static_cast<int>(set.ranks.size())),
                    "names participants that do not exist");
      for (const int lost : decision.lost)
        refuse_unless(lost >= 0 && lost < common_.transport.size(), "names a rank that does not exist");
      for (const std::string& name : decision.names) set.stalled.erase(name);
      set.decisions.push_back(std::move(decision));
      break;
    }
    case Message::kStalled: set.stalled.insert(reader.text()); break;
    case Message::kSharedBlock: set.connect(from, reader.get<Location>()); break;
    case Message::kOneShot: {
      const auto turn = reader.get<std::uint64_t>();
      const auto number = reader.get<OneShot::Number>();
      const auto after = reader.get<std::uint64_t>();
      const bool call = reader.get<std::uint8_t>() != 0;
      const int late = reader.get<int>();
      set.receive(index, {turn, {number, after}, call, late}, reader.rest());
      break;
    }
    case Message::kGaveUp: {
      const auto sequence = reader.get<std::uint64_t>();
      const std::string text = reader.text();
      std::vector<int> lost = reader.list<int>();
      for (const int rank : lost)
        refuse_unless(rank >= 0 && rank < common_.transport.size(), "names a rank that does not exist");
      hear_of_given_up(set, sequence, PeerLost(text, std::move(lost)));
      break;
    }
    default: break;  // kinds that do not concern a process set
  }
}

bool Scheduler::advance() {
  bool moved = false;
  for (auto& [id, set] : sets_) {
    if (!set->running && set->decisions.empty()) continue;
    try {
      moved |= advance(*set);
    } catch (const PeerLost& error) {
      if (!common_.peers.tolerates_losses() || !set->running) throw;
      give_up(*set, error);
    }
  }
  for (Submission& removal : std::exchange(removals_, {})) {
    remove_set(removal.request.set_change.removed);
    finish(removal, nullptr);
  }
  release_blocks();
  return moved;
}

// A rank whose memory is gone counts as lost, even if no other sign of its loss has been seen.
bool Scheduler::resume(Running& running) {
  try {
    const bool moved = running.task.resume();
    if (running.participants->lost) std::rethrow_exception(running.participants->lost);
    return moved;
  } catch (const MemoryGone& error) {
    throw_lost(running.decision.names.front(), error);
  }
}

void Scheduler::throw_lost(const std::string& operation, const MemoryGone& error) const {
  throw PeerLost("'" + operation + "' needs rank " + std::to_string(error.rank) + " on " +
                     common_.transport.host_of(error.rank) + ", which is lost: " + error.what(),
                 {error.rank});
}

bool Scheduler::advance(ProcessSet& set) {
  if (!set.running) {
    if (!set.ready() || set.holds_decisions()) return false;
    Decision decision = std::move(set.decisions.front());
    set.decisions.pop_front();
    execute(set, std::move(decision));
    if (!set.running) return true;
  }
  Running& running = *set.running;
  // MPI that takes device memory uses the thread's current device.
  const auto& device = running.first().device;
  const std::shared_ptr<void> used = device ? device->use() : nullptr;
  const bool moved = resume(running);
  if (!running.task.done()) {
    if (!moved && common_.ledger.keeps_spans()) look_for_late(running);
    return moved;
  }
  common_.traffic.operations.fetch_add(1);
  if (running.channel || running.barrier) device_in_flight_.add(running, set.timeout_s);
  if (*running.route) {
    std::lock_guard lock(mutex_);
    ++routes_[running.route];
  }
  set.remember(running);
  if (common_.trace.on()) trace_run(running);
  if (common_.ledger.keeps_spans()) note_run(running);
  std::vector<Submission> done = std::move(running.submissions);
  set.running.reset();
  const Effect effect = collective(done.front().request.opcode).effect;
  if (effect == Effect::kRemovesSet) {
    removals_.push_back(std::move(done.front()));  // the caller is iterating over the sets
    return true;
  }
  if (effect == Effect::kAddsSet) add_set(done.front().handle->set_id, done.front().request.set_change.ranks);
  for (Submission& submission : done) finish(submission, nullptr);
  return true;
}

void Scheduler::execute(ProcessSet& set, Decision decision) {
  std::vector<Submission> submissions;
  const bool takes_part =
      std::find(decision.participants.begin(), decision.participants.end(), set.me) != decision.participants.end();
  if (takes_part) submissions = take_decided(set, decision);
  const Time now = steady_clock::now();
  if (common_.trace.on()) trace_negotiated(submissions, now);
  if (decision.verdict != Verdict::kRun) return refuse(decision, submissions);
  if (takes_part) check(set, decision, submissions);
  auto participants = set.gather(decision.participants);
  const auto given_up = set.given_up.extract(set.sequence());
  if (!participants) return;
  if (given_up) return fail(submissions, given_up.mapped());
  if (const std::vector<int> gone = set.unmapped(decision.participants); !gone.empty()) {
    const PeerLost error("'" + decision.names.front() + "' needs rank " + std::to_string(gone.front()) +
                             ", which ended before this rank could map its memory",
                         gone);
    if (!common_.peers.tolerates_losses()) throw error;
    return fail(submissions, error);
  }
  Running& running = set.running.emplace();
  running.decision = std::move(decision);
  running.submissions = std::move(submissions);
  running.participants = std::move(participants);
  running.since = now;
  running.awaited_since = common_.clock.now();
  running.staging = &staging_;
  running.channels = &set.channels;
  running.devices = &set.devices;
  running.task = running.first().device ? run_on_device(running) : collective(running.first().opcode).run(running);
}

// Checks a decision against the requests: it comes from another process, and the following code relies on it.
void Scheduler::check(const ProcessSet& set, const Decision& decision,
                      const std::vector<Submission>& submissions) const {
  const auto refuse_unless = [&](bool holds) {
    if (!holds) throw TransportError("the decision on '" + decision.names.front() + "' does not fit the request");
  };
  const Request& first = submissions.front().request;
  const Collective& what = collective(first.opcode);
  const auto& members = decision.participants;
  refuse_unless(what.zeros_stand_in || members.size() == set.ranks.size());
  for (const Submission& submission : submissions) {
    const Request& next = submission.request;
    refuse_unless(submissions.size() == 1 ||
                  (what.fuses && next.opcode == first.opcode && next.op == first.op && next.device == first.device));
  }
  const auto me = static_cast<std::size_t>(std::find(members.begin(), members.end(), set.me) - members.begin());
  refuse_unless(!what.fits || what.fits(first, decision.merged, members.size(), me));
  // A coordinator does not know which ids another coordinator gives at the same time.
  if (what.effect == Effect::kAddsSet && !is_free(decision.merged.set_id)) {
    throw TransportError("process sets whose parents have different first ranks were added at once, and both got id " +
                         std::to_string(decision.merged.set_id) + ". Add them one after the other");
  }
}

bool Scheduler::is_free(int id) const {
  const auto shares_tags = [id](const auto& entry) { return tag_set_of(entry.first) == tag_set_of(id); };
  return !made_.contains(id) && std::none_of(sets_.begin(), sets_.end(), shares_tags);
}

void Scheduler::fail(std::vector<Submission>& submissions, const PeerLost& error) {
  for (Submission& submission : submissions) finish(submission, std::make_exception_ptr(error));
}

std::vector<Submission> Scheduler::take_decided(ProcessSet& set, const Decision& decision) {
  std::vector<Submission> submissions;
  std::lock_guard lock(mutex_);
  for (const std::string& name : decision.names) {
    const auto found = outstanding_.find(key_of(set.id, name));
    if (found == outstanding_.end() || !found->second.handle || std::exchange(found->second.begun, true)) {
      throw TransportError("rank " + std::to_string(common_.transport.rank()) + " received a decision to run '" + name +
                           "', which it never announced");
    }
    submissions.push_back(found->second);
  }
  return submissions;
}

void Scheduler::refuse(const Decision& decision, std::vector<Submission>& submissions) {
  std::exception_ptr error;
  if (decision.verdict == Verdict::kPeerLost) {
    error = std::make_exception_ptr(PeerLost(decision.error, decision.lost));
  } else {
    error = std::make_exception_ptr(OperationMismatch(decision.error));
  }
  for (Submission& submission : submissions) finish(submission, error);
}

void Scheduler::trace_negotiated(const std::vector<Submission>& submissions, Time now) {
  for (const Submission& submission : submissions) {
    const std::string activity = "NEGOTIATE_" + upper(collective(submission.request.opcode).name);
    common_.trace.span(submission.request.name, activity, submission.since, now, 0);
  }
  common_.trace.mark("CYCLE_START");
}

void Scheduler::trace_run(const Running& running) {
  for (const Submission& submission : running.submissions) {
    const std::string way = *running.route ? running.route + std::string("_") : "";
    const std::string activity = way + upper(collective(submission.request.opcode).name);
    std::size_t bytes = 0;
    for (const Tensor& tensor : submission.request.tensors) bytes += tensor.bytes();
    common_.trace.span(submission.request.name, activity, running.since, steady_clock::now(), bytes);
  }
}

// Records the ranks that the operation waits for, at most every 20 us.
void Scheduler::look_for_late(Running& running) {
  constexpr std::chrono::microseconds kEvery{20};
  const Time now = steady_clock::now();
  if (now - running.looked < kEvery) return;
  running.looked = now;
  std::vector<int> late = running.participants->laggards();
  if (running.late.empty() ? !late.empty() : running.late.back().second != late)
    running.late.emplace_back(now, std::move(late));
}

void Scheduler::note_run(const Running& running) {
  using What = Ledger::What;
  const Time now = steady_clock::now();
  const Request& first = running.first();
  if (running.decision.last >= 0) {
    for (const Submission& submission : running.submissions)
      common_.ledger.note(What::kMeet, submission.since, running.since, running.decision.last, 0,
                          submission.request.name);
  }
  std::size_t bytes = first.exchange ? first.exchange->layout->bytes() : 0;
  for (const Submission& submission : running.submissions) {
    for (const Tensor& tensor : submission.request.tensors) bytes += tensor.bytes();
  }
  // If several ranks were late at once, the wait is attributed to one of them.
  int missed = -1;
  Time end = now;
  for (auto part = running.late.rbegin(); part != running.late.rend(); ++part) {
    const auto& [begin, late] = *part;
    if (std::find(late.begin(), late.end(), missed) == late.end()) missed = late.empty() ? -1 : late.back();
    common_.ledger.note(What::kMove, begin, end, missed, 0, first.name);
    end = begin;
  }
  common_.ledger.note(What::kMove, running.since, end, -1, bytes, first.name);
}

}  // namespace sordino
