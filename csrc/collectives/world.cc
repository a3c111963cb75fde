#include "collectives/world.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <thread>

#include "collectives/operations.h"

namespace sordino {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kWatchEvery{10};

// First byte of a control message.
enum class Message : std::uint8_t { kAnnounce, kDecision, kDesk, kFreed, kBye, kFailed };
enum class Failure : std::uint8_t { kPeerLost, kTimeout, kOther };

std::string key_of(int set, const std::string& name) { return std::to_string(set) + "/" + name; }

std::string list(const std::vector<int>& ranks) {
  std::string out;
  for (std::size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
  return out;
}

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

std::string whole(double value) { return std::to_string(static_cast<long long>(value)); }

double seconds(Time from, Time to) { return duration<double>(to - from).count(); }

// Ranks that have a core each may spin while they wait; ranks that outnumber the cores must leave them to each other.
std::chrono::microseconds spin_for(const Transport& transport, const Config& config) {
  const auto& node_of = transport.node_of();
  const auto here = std::count(node_of.begin(), node_of.end(), node_of[transport.rank()]);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const bool known = sched_getaffinity(0, sizeof(cores), &cores) == 0;
  const auto available = known ? CPU_COUNT(&cores) : static_cast<int>(std::thread::hardware_concurrency());
  return std::chrono::microseconds(here <= available ? config.spin_us : 0);
}

}  // namespace

World::World(std::unique_ptr<Transport> transport, const Config& config)
    : config_(config), transport_(std::move(transport)), gone_(static_cast<std::size_t>(transport_->size()), false) {
  std::vector<int> everybody(static_cast<std::size_t>(size()));
  for (int rank = 0; rank < size(); ++rank) everybody[static_cast<std::size_t>(rank)] = rank;
  add_set(0, std::move(everybody));
  if (!config.timeline.empty() && rank() == 0) trace_.start(config.timeline, 0, false);
  progress_ = std::make_unique<Progress>(
      *transport_, [this] { return poll(); }, [this] { return busy(); }, spin_for(*transport_, config));
}

World::~World() {
  shutdown();
  if (forked()) static_cast<void>(progress_.release());  // its thread exists in the parent only
}

// ---- what users call -------------------------------------------------------------------------------------------

std::shared_ptr<Handle> World::run(Request request) {
  auto handle = enqueue(std::move(request));
  wait(*handle);
  return handle;
}

std::shared_ptr<Handle> World::submit(Request request) {
  auto handle = enqueue(std::move(request));
  progress_->notify();
  return handle;
}

std::shared_ptr<Handle> World::enqueue(Request request) {
  if (forked()) {
    throw UsageError(
        "this process was forked after init(), so it is no rank; communicate from the parent, or start "
        "workers before init() or with the 'spawn' method");
  }
  auto handle = std::make_shared<Handle>();
  {
    std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    const auto found = sets_.find(request.set);
    if (found == sets_.end())
      throw UsageError("process set " + std::to_string(request.set) + " does not exist (any more)");
    if (found->second->me < 0) {
      throw UsageError("rank " + std::to_string(rank()) + " is not a member of process set " +
                       std::to_string(request.set));
    }
    const auto [place, added] = outstanding_.try_emplace(key_of(request.set, request.name));
    if (!added) {
      throw UsageError("an operation named '" + request.name +
                       "' is still under way on this rank; wait for it, or give this one "
                       "another name");
    }
    in_flight_.fetch_add(1);
    submitted_.push_back({std::move(request), handle, steady_clock::now()});
    submitted_any_ = true;
  }
  return handle;
}

void World::wait(const Handle& handle) {
  if (handle.done()) return;
  const Time begin = steady_clock::now();
  progress_->wait([&] { return handle.done(); });
  waited_ns_.fetch_add(static_cast<std::uint64_t>(std::chrono::nanoseconds(steady_clock::now() - begin).count()));
}

std::vector<int> World::members(int set) const {
  std::lock_guard lock(mutex_);
  const auto found = sets_.find(set);
  if (found == sets_.end()) throw UsageError("process set " + std::to_string(set) + " does not exist (any more)");
  return found->second->ranks;
}

std::vector<int> World::sets() const {
  std::lock_guard lock(mutex_);
  std::vector<int> ids;
  for (const auto& [id, set] : sets_) ids.push_back(id);
  return ids;
}

std::vector<std::string> World::names_in_flight() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [key, submission] : outstanding_) names.push_back(key.substr(key.find('/') + 1));
  return names;
}

void World::shutdown() {
  if (forked() || std::exchange(shut_down_, true)) return;
  progress_->stop();
  bool failed = false;
  {
    std::lock_guard lock(mutex_);
    failed = failure_ != nullptr;
  }
  if (!failed) {
    // What was decided is brought to its end, so that no peer waits for this rank's part of it.
    const auto settled = [this] {
      return failure_ || std::all_of(sets_.begin(), sets_.end(), [](auto& entry) {
               return !entry.second->running && entry.second->decisions.empty();
             });
    };
    const Time limit = steady_clock::now() + std::chrono::seconds(5);
    progress_->wait([&] { return settled() || steady_clock::now() > limit; });
    const Bytes bye = Writer().put(Message::kBye).take();
    progress_->alone([&] {
      try {
        for (int peer = 0; peer < size(); ++peer) {
          if (peer != rank() && !gone_[static_cast<std::size_t>(peer)]) transport_->post(peer, bye);
        }
      } catch (const Error&) {
        transport_->abandon();  // a peer has died meanwhile; there is nobody to say goodbye to
      }
    });
    const Time flushed = steady_clock::now() + std::chrono::seconds(1);
    progress_->wait([&] { return transport_->idle() || failure_ || steady_clock::now() > flushed; });
  }
  progress_->alone([this] { fail(std::make_exception_ptr(Error("Sordino has been shut down")), false); });
  trace_.stop();
}

void World::abort(const std::string& cause) {
  if (forked() || shut_down_) return;
  progress_->stop();
  const std::string text =
      "rank " + std::to_string(rank()) + " on " + transport_->host_of(rank()) + " has ended: " + cause;
  progress_->alone([&] { fail(std::make_exception_ptr(PeerLost(text, {rank()})), true); });
  const Time limit = steady_clock::now() + milliseconds(200);
  progress_->wait([&] { return transport_->idle() || steady_clock::now() > limit; });
  shut_down_ = true;
}

bool World::busy() const {
  // Without bells, what MPI has buffered leaves only when somebody polls, so go on a little after the last move.
  constexpr milliseconds kLinger{5};
  return in_flight_.load() > 0 || (!transport_->rings_always() && steady_clock::now() - last_move_.load() < kLinger);
}

// ---- what the driver runs --------------------------------------------------------------------------------------

bool World::poll() {
  try {
    bool moved = announce_submissions();
    moved |= transport_->poll([this](int from, std::span<const std::byte> message) { receive(from, message); });
    moved |= decide();
    const Time now = steady_clock::now();
    for (auto& [id, set] : sets_) {
      if (set->running || !set->decisions.empty()) moved |= advance(*set);
    }
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
  for (Submission& submission : fresh) {
    ProcessSet& set = *sets_.at(submission.request.set);
    const Announcement said = Announcement::of(submission.request);
    const int coordinator = set.coordinator();
    {
      std::lock_guard lock(mutex_);
      outstanding_[key_of(set.id, said.name)] = std::move(submission);
    }
    if (coordinator == rank()) {
      set.negotiation->announce(set.me, said, steady_clock::now());
    } else {
      Writer writer;
      writer.put(Message::kAnnounce).put(set.id);
      said.write(writer);
      transport_->post(coordinator, writer.take());
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
      if (found == outstanding_.end() || !found->second.handle) {
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
  auto team = set.make_team(decision.participants, traffic_);
  if (!team) return;
  set.running.emplace(Running{std::move(decision), std::move(submissions), std::move(team), {}, now});
  set.running->task = run_operation(*set.running);
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
  const bool moved = running.task.resume();
  if (!running.task.done()) return moved;
  traffic_.operations.fetch_add(1);
  set.remember_slots(*running.team);
  if (trace_.on()) {
    for (const Submission& submission : running.submissions) {
      const std::string kind = upper(name_of(submission.request.kind));
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

// ---- process sets ----------------------------------------------------------------------------------------------

ProcessSet& World::add_set(int id, std::vector<int> ranks) {
  const std::size_t chunk = transport_->shares_memory() ? config_.chunk_bytes : 0;
  const int patience = spin_for(*transport_, config_).count() > 0 ? 200 : 0;
  auto made = std::make_unique<ProcessSet>(id, std::move(ranks), *transport_, chunk, patience, config_.fusion_bytes);
  ProcessSet& set = *made;
  {
    std::lock_guard lock(mutex_);
    sets_[id] = std::move(made);
  }
  if (const Location desk = set.desk_location(); desk.segment != 0) {
    const Bytes message = Writer().put(Message::kDesk).put(id).put(desk).take();
    for (const int peer : set.node_peers()) transport_->post(peer, message);
  }
  newest_set_ = std::max(newest_set_, id);
  for (Early& early : std::exchange(early_, {})) receive(early.from, early.message);
  return set;
}

void World::remove_set(int id) {
  std::unique_ptr<ProcessSet> removed;
  std::vector<Submission> orphans;
  {
    std::lock_guard lock(mutex_);
    const auto found = sets_.find(id);
    if (found == sets_.end()) return;
    removed = std::move(found->second);
    sets_.erase(found);
    for (auto& [key, submission] : outstanding_) {
      if (submission.handle && submission.request.set == id) orphans.push_back(submission);
    }
    std::erase_if(submitted_, [&](Submission& submission) {
      if (submission.request.set != id) return false;
      orphans.push_back(submission);
      return true;
    });
  }
  const auto error = std::make_exception_ptr(
      UsageError("process set " + std::to_string(id) + " was removed before the operation ran"));
  for (Submission& submission : orphans) finish(submission, error);
}

// ---- messages --------------------------------------------------------------------------------------------------

void World::receive(int from, std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const auto message = reader.get<Message>();
  switch (message) {
    case Message::kAnnounce:
    case Message::kDecision:
    case Message::kDesk: {
      const int id = reader.get<int>();
      if (id > newest_set_) {
        early_.push_back({id, from, Bytes(bytes.begin(), bytes.end())});  // its sender has made the set sooner
        break;
      }
      const auto found = sets_.find(id);
      if (found == sets_.end()) break;  // a set removed meanwhile
      ProcessSet& set = *found->second;
      if (message == Message::kAnnounce) {
        set.negotiation->announce(set.index_of(from), Announcement::read(reader), steady_clock::now());
      } else if (message == Message::kDecision) {
        set.decisions.push_back(Decision::read(reader));
      } else {
        set.meet(from, reader.get<Location>());
      }
      break;
    }
    case Message::kFreed:
      for (const std::uint64_t segment : reader.list<std::uint64_t>()) transport_->node_memory().unmap(from, segment);
      break;
    case Message::kBye: leave(from); break;
    case Message::kFailed: {
      const auto failure = reader.get<Failure>();
      const std::string text = reader.text(), operation = reader.text();
      const std::vector<int> ranks = reader.list<int>();
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

void World::leave(int peer) {
  gone_[static_cast<std::size_t>(peer)] = true;
  for (auto& [id, set] : sets_) {
    const int index = set->index_of(peer);
    if (index >= 0 && set->negotiation) set->negotiation->leave(index);
  }
}

// ---- failures --------------------------------------------------------------------------------------------------

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
      throw PeerLost(
          "rank " + std::to_string(loss.rank) + " on " + transport_->host_of(loss.rank) + " is lost: " + loss.cause,
          {loss.rank});
    }
  }
  for (auto& [id, set] : sets_) {
    if (set->running && seconds(set->running->since, now) > config_.timeout_s) {
      const std::string& name = set->running->decision.names.front();
      const std::vector<int> late = set->running->team->laggards();
      throw Timeout(
          "'" + name + "' has run for " + whole(config_.timeout_s) + " s and still waits for ranks " + list(late), name,
          late);
    }
    if (set->negotiation) watch_coordinated(*set, now);
  }
  watch_own(now);
}

void World::watch_coordinated(ProcessSet& set, Time now) {
  for (const Negotiation::Waiting& waiting : set.negotiation->waiting()) {
    const double waited = seconds(waiting.since, now);
    if (waiting.missing.empty() || waited < std::min(config_.stall_warn_s, config_.timeout_s)) continue;
    const std::string text = std::string(name_of(waiting.kind)) + " '" + waiting.name + "' has waited " +
                             whole(waited) + " s for ranks " + list(waiting.missing);
    if (waited > config_.timeout_s)
      throw Timeout(text + ", more than SORDINO_TIMEOUT_S", waiting.name, waiting.missing);
    if (!waiting.warned) {
      std::cerr << "sordino: stalled: " + text + ". They compute long, wait for something else, or never call it.\n"
                << std::flush;
      set.negotiation->mark_warned(waiting.name);
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
      if (seconds(submission.since, now) > config_.timeout_s + kGrace) {
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
  if (tell) {
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
  for (Submission& submission : lost) finish(submission, failure);
}

}  // namespace sordino
