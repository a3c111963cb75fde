// What the driver of a world runs: announcements out, messages in, decisions made and obeyed, operations advanced.
#include <algorithm>
#include <limits>
#include <numeric>

#include "collectives/control.h"
#include "collectives/operations.h"
#include "collectives/world.h"

namespace sordino {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kWatchEvery{10};
// Node peers that are copying what a service offered have heard of its end by then.
constexpr milliseconds kReadUntil{1000};

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

}  // namespace

bool World::poll() {
  if (retired_) return false;
  try {
    bool moved = announce_submissions();
    moved |= transport_->poll([this](int from, std::span<const std::byte> message) { receive(from, message); });
    if (membership_) may_succeed_ = membership_->ended() || membership_->past(view_.epoch);
    moved |= decide();
    const Time now = steady_clock::now();
    for (auto& [id, set] : sets_) {
      if (!set->running && set->decisions.empty()) continue;
      try {
        moved |= advance(*set);
      } catch (const PeerLost&) {
        if (!outlives_ || !set->running) throw;
        give_up(*set, std::current_exception());
      }
    }
    for (auto& [number, service] : services_) moved |= service->advance(now);
    std::erase_if(closed_, [now](Closed& closed) {
      closed.service->advance(now);
      return closed.service->settled() && now - closed.since > kReadUntil;
    });
    for (Submission& removal : std::exchange(removals_, {})) {
      remove_set(static_cast<int>(removal.request.splits.at(0)));
      finish(removal, nullptr);
    }
    if (moved) last_move_ = now;
    if (now - last_watch_ > kWatchEvery) {
      last_watch_ = now;
      watch(now);
    }
    return moved;
  } catch (...) {
    fail(std::current_exception(), !told_);
    return true;
  }
}

bool World::announce_submissions() {
  if (!submitted_any_.exchange(false)) return false;
  std::deque<Submission> fresh;
  {
    std::lock_guard lock(mutex_);
    fresh.swap(submitted_);
  }
  // All are outstanding before any is announced: if an announcement fails, the failure finds every handle.
  std::vector<std::pair<ProcessSet*, Announcement>> said;
  {
    std::lock_guard lock(mutex_);
    for (Submission& submission : fresh) {
      ProcessSet& set = *sets_.find(submission.request.set)->second;
      if (is_direct(submission.request.kind)) {
        std::vector<int> everybody(set.ranks.size());
        std::iota(everybody.begin(), everybody.end(), 0);
        Decision& decision = set.decisions.emplace_back();
        decision.names = {submission.request.name};
        decision.participants = std::move(everybody);
      } else {
        if (submission.request.kind == Kind::kAddSet) submission.request.root = newest_set_;
        said.emplace_back(&set, Announcement::of(submission.request));
        if (const auto& device = submission.request.device) said.back().second.abilities = abilities(*device);
      }
      outstanding_[key_of(set.id, submission.request.name)] = std::move(submission);
    }
  }
  for (auto& [set, announcement] : said) {
    if (set->coordinator() == rank()) {
      set->negotiation->announce(set->me, std::move(announcement), steady_clock::now());
    } else {
      Writer writer;
      writer.put(Message::kAnnounce).put(set->id);
      announcement.write(writer);
      transport_->post(set->coordinator(), writer.take());
    }
  }
  return true;
}

bool World::decide() {
  bool decided = false;
  for (auto& [id, set] : sets_) {
    if (!set->negotiation) continue;
    for (Decision& decision : set->negotiation->decide()) {
      Writer writer;
      writer.put(Message::kDecision).put(id);
      decision.write(writer);
      post_to_members(*set, writer.take());
      set->decisions.push_back(std::move(decision));
      decided = true;
    }
  }
  return decided;
}

void World::post_to_members(const ProcessSet& set, const Bytes& message) {
  for (const int member : set.ranks) {
    if (member != rank() && !gone_[static_cast<std::size_t>(member)]) transport_->post(member, message);
  }
}

void World::finish(Submission& submission, std::exception_ptr error) {
  {
    std::lock_guard lock(mutex_);
    outstanding_.erase(key_of(submission.request.set, submission.request.name));
    in_flight_.fetch_sub(1);
    if (submission.request.device) on_devices_.fetch_sub(1);
  }
  submission.handle->finish(std::move(error));
}

void World::obey(ProcessSet& set, Decision decision) {
  std::vector<Submission> submissions;
  const bool takes_part =
      std::find(decision.participants.begin(), decision.participants.end(), set.me) != decision.participants.end();
  if (takes_part) {
    std::lock_guard lock(mutex_);
    for (const std::string& name : decision.names) {
      const auto found = outstanding_.find(key_of(set.id, name));
      if (found == outstanding_.end() || !found->second.handle || std::exchange(found->second.begun, true)) {
        throw TransportError("rank " + std::to_string(rank()) + " was told to run '" + name +
                             "', which it never announced");
      }
      submissions.push_back(found->second);
    }
  }
  const Time now = steady_clock::now();
  if (trace_.on()) {
    for (const Submission& submission : submissions) {
      const std::string kind = upper(name_of(submission.request.kind));
      trace_.span(submission.request.name, "NEGOTIATE_" + kind, submission.since, now, 0);
    }
    trace_.mark("CYCLE_START");
  }
  if (decision.verdict != Verdict::kRun) {
    std::exception_ptr error;
    if (decision.verdict == Verdict::kPeerLost) {
      error = std::make_exception_ptr(PeerLost(decision.error, decision.lost));
    } else {
      error = std::make_exception_ptr(OperationMismatch(decision.error));
    }
    for (Submission& submission : submissions) finish(submission, error);
    return;
  }
  if (takes_part) check(set, decision, submissions);
  auto team = set.make_team(decision.participants, traffic_);
  if (!team) return;
  Running& running = set.running.emplace();
  running.decision = std::move(decision);
  running.submissions = std::move(submissions);
  running.team = std::move(team);
  running.since = now;
  running.staging = staging_.get();
  running.channels = &set.channels;
  set.running->task = run_operation(*set.running);
}

// What the coordinator has decided comes from another process, and what follows believes it.
void World::check(const ProcessSet& set, const Decision& decision, const std::vector<Submission>& submissions) const {
  const auto refuse_unless = [&](bool holds) {
    if (!holds) throw TransportError("the decision on '" + decision.names.front() + "' does not fit the request");
  };
  const Request& first = submissions.front().request;
  const std::size_t parts = decision.participants.size();
  const auto& numbers = decision.numbers;
  const bool zeros_stand_in = first.kind == Kind::kAllreduce || first.kind == Kind::kBarrier;
  refuse_unless(zeros_stand_in || parts == set.ranks.size());
  for (const Submission& other : submissions) {
    const Request& next = other.request;
    refuse_unless(submissions.size() == 1 ||
                  (next.kind == Kind::kAllreduce && next.op == first.op && next.device == first.device));
  }
  // So much of a tensor that the sum of all participants' bytes is still a number.
  const auto rows_fit = [&](const Tensor& tensor, std::span<const std::int64_t> rows) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
    const auto most = kMost / rows.size() / std::max<std::size_t>(tensor.row_bytes(), 1);
    return std::all_of(rows.begin(), rows.end(),
                       [&](std::int64_t count) { return static_cast<std::uint64_t>(count) <= most; });
  };
  const auto me = static_cast<std::size_t>(
      std::find(decision.participants.begin(), decision.participants.end(), set.me) - decision.participants.begin());
  switch (first.kind) {
    case Kind::kAllgather:
      refuse_unless(numbers.size() == first.tensors.size() * parts);
      for (std::size_t index = 0; index < first.tensors.size(); ++index) {
        const Tensor& tensor = first.tensors[index];
        const std::span rows(numbers.data() + index * parts, parts);
        refuse_unless(rows_fit(tensor, rows) && rows[me] == tensor.shape[0]);
      }
      break;
    case Kind::kAlltoall:
      refuse_unless(numbers.size() == parts * parts && rows_fit(first.tensors[0], numbers) &&
                    std::equal(first.splits.begin(), first.splits.end(), numbers.begin() + me * parts));
      break;
    case Kind::kJoin: refuse_unless(numbers.size() == 1); break;
    case Kind::kAddSet:
      refuse_unless(numbers.size() == 1 && numbers[0] > newest_set_ && numbers[0] <= std::numeric_limits<int>::max());
      break;
    default: break;
  }
}

bool World::advance(ProcessSet& set) {
  if (!set.running) {
    if (!set.ready()) return false;
    Decision decision = std::move(set.decisions.front());
    set.decisions.pop_front();
    obey(set, std::move(decision));
    if (!set.running) return true;
  }
  Running& running = *set.running;
  // MPI that takes device memory goes by the thread's current device.
  const auto& device = running.submissions.front().request.device;
  const std::shared_ptr<void> used = device ? device->use() : nullptr;
  const bool moved = running.task.resume();
  if (!running.task.done()) return moved;
  traffic_.operations.fetch_add(1);
  if (running.channel) {
    Flying& one = flying_.emplace_back(Flying{running.channel, {}, running.decision.names.front(), running.since});
    for (const Submission& submission : running.submissions) one.handles.push_back(submission.handle);
  }
  if (*running.route) {
    std::lock_guard lock(mutex_);
    ++routes_[running.route];
  }
  set.remember(*running.team);
  if (trace_.on()) {
    for (const Submission& submission : running.submissions) {
      const std::string way = *running.route ? running.route + std::string("_") : "";
      const std::string kind = way + upper(name_of(submission.request.kind));
      std::size_t bytes = 0;
      for (const Tensor& tensor : submission.request.tensors) bytes += tensor.bytes();
      trace_.span(submission.request.name, kind, running.since, steady_clock::now(), bytes);
    }
  }
  std::vector<Submission> done = std::move(running.submissions);
  set.running.reset();
  const Request& first = done.front().request;
  if (first.kind == Kind::kRemoveSet) {
    removals_.push_back(std::move(done.front()));  // poll() is walking over the sets
    return true;
  }
  if (first.kind == Kind::kAddSet) {
    add_set(static_cast<int>(done.front().handle->numbers.at(0)), {first.splits.begin(), first.splits.end()});
  }
  for (Submission& submission : done) finish(submission, nullptr);
  return true;
}

void World::receive(int from, std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const auto message = reader.one_of(kLastMessage);
  const auto refuse_unless = [&](bool holds, const char* what) {
    if (!holds) throw TransportError("rank " + std::to_string(from) + " " + what);
  };
  const auto check_ranks = [&](const std::vector<int>& ranks) {
    for (const int rank : ranks) refuse_unless(rank >= 0 && rank < size(), "tells of a rank that there is not");
  };
  switch (message) {
    case Message::kAnnounce:
    case Message::kDecision:
    case Message::kStalled:
    case Message::kDesk: {
      const int id = reader.get<int>();
      if (id > newest_set_) {
        early_.push_back({id, from, Bytes(bytes.begin(), bytes.end())});  // its sender has made the set sooner
        break;
      }
      const auto found = sets_.find(id);
      if (found == sets_.end()) break;  // a set removed meanwhile
      ProcessSet& set = *found->second;
      const int index = set.index_of(from);
      refuse_unless(index >= 0 && set.me >= 0, "speaks of a process set that it is not in, or this rank is not");
      if (message == Message::kAnnounce) {
        refuse_unless(set.negotiation.has_value(), "announces to a rank that does not coordinate");
        set.negotiation->announce(index, Announcement::read(reader), steady_clock::now());
      } else if (message == Message::kDecision) {
        refuse_unless(from == set.coordinator(), "decides and does not coordinate");
        Decision decision = Decision::read(reader);
        const auto& some = decision.participants;
        refuse_unless(some.empty() || (some.front() >= 0 && some.back() < static_cast<int>(set.ranks.size())),
                      "tells of participants that there are not");
        check_ranks(decision.lost);
        set.decisions.push_back(std::move(decision));
        for (const std::string& name : set.decisions.back().names) set.stalled.erase(name);
      } else if (message == Message::kStalled) {
        set.stalled.insert(reader.text());
      } else {
        set.meet(from, reader.get<Location>());
      }
      break;
    }
    case Message::kFreed:
      for (const std::uint64_t segment : reader.list<std::uint64_t>()) transport_->node_memory().unmap(from, segment);
      break;
    case Message::kBye: leave(from, true); break;
    case Message::kService: {
      const auto found = services_.find(reader.get<int>());
      if (found != services_.end()) found->second->receive(from, reader);
      break;
    }
    case Message::kClosed: {
      const auto found = services_.find(reader.get<int>());
      if (found != services_.end()) found->second->lost(from);
      break;
    }
    case Message::kFailed: {
      if (outlives_) {
        reader.one_of(kLastFailure);
        lose(from, "it has failed: " + reader.text(), true);
        break;
      }
      const auto failure = reader.one_of(kLastFailure);
      const std::string text = reader.text(), operation = reader.text();
      const std::vector<int> ranks = reader.list<int>();
      check_ranks(ranks);
      told_ = true;  // whoever failed has told everybody
      switch (failure) {
        case Failure::kPeerLost: throw PeerLost(text, ranks);
        case Failure::kTimeout: throw Timeout(text, operation, ranks);
        case Failure::kOther: throw PeerLost("rank " + std::to_string(from) + " has failed: " + text, {from});
      }
      break;
    }
  }
}

void World::leave(int peer, bool certain) {
  gone_[static_cast<std::size_t>(peer)] = true;
  if (membership_ && certain) membership_->left(member(peer));
  for (auto& [id, set] : sets_) tell_left(*set, peer);
  for (auto& [number, service] : services_) service->lost(peer);
}

void World::tell_left(ProcessSet& set, int peer) {
  const int index = set.index_of(peer);
  if (index >= 0 && set.negotiation) set.negotiation->leave(index);
}

}  // namespace sordino
