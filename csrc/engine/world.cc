#include "engine/world.h"

#include <sched.h>

#include <algorithm>
#include <cmath>

#include "base/keep.h"
#include "base/relax.h"
#include "engine/control.h"
#include "engine/telling.h"

namespace sordino {
namespace {

using membership::Membership;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kWatchEvery{10};

// Ranks spin while they wait if there is a core for each of them. Otherwise they must leave the cores to each other.
std::chrono::microseconds spin_for(const Transport& transport, const Config& config) {
  return std::chrono::microseconds(transport.ranks_per_core() <= 1 ? config.spin_us : 0);
}

// Time after which a sleeping rank wakes by itself: kForEachRank (in s) times the number of ranks per core, so that
// waking (about 15 us) takes at most 1/20 of a core's time. The time must be at most half of the longest step that the
// clock of deadlines counts.
std::chrono::microseconds nap_for(const Transport& transport, const Config& config) {
  constexpr double kForEachRank = 300e-6, kMost = 0.1;
  static_assert(std::chrono::duration<double>(2 * kMost) <= AwakeClock::kLongestStep);
  const double most = config.survive_losses ? std::min(kMost, config.silence_s / 40) : kMost;
  return std::chrono::microseconds(std::llround(1e6 * std::min(kForEachRank * transport.ranks_per_core(), most)));
}

}  // namespace

World::Position World::position_of(std::unique_ptr<Transport> transport, const Config& config) {
  if (config.survive_losses) return position_in(std::make_shared<Membership>(std::move(transport), config.silence_s));
  Position place;
  for (int rank = 0; rank < transport->size(); ++rank) place.view.members.push_back(rank);
  place.transport = std::move(transport);
  return place;
}

World::Position World::position_in(std::shared_ptr<Membership> membership) {
  Position place;
  place.view = membership->view();
  place.transport = membership->enter();
  place.membership = std::move(membership);
  return place;
}

World::World(std::unique_ptr<Transport> transport, const Config& config)
    : World(position_of(std::move(transport), config), config, 0) {}

World::World(Position place, const Config& config, std::uint64_t first_tag)
    : config_(config),
      membership_(std::move(place.membership)),
      view_(std::move(place.view)),
      transport_(std::move(place.transport)),
      common_(*transport_) {
  const std::chrono::microseconds spin = spin_for(*transport_, config);
  patience_ = spin.count() > 0 ? 200 : 0;
  scheduler_ = std::make_unique<Scheduler>(common_, config, patience_);
  services_ = std::make_unique<ServiceHost>(common_, [this] { wake(); }, first_tag);
  messages_ = std::make_unique<PointToPoint>(common_, *services_);
  failures_ = std::make_unique<FailureDetector>(common_, *scheduler_, *services_, *messages_, config, receive_,
                                                membership_.get(), view_);
  progress_ = std::make_unique<Progress>(
      *transport_, [this] { return poll(); }, [this] { return work(); },
      [this] {
        return transport_->rings_always() && !scheduler_->on_devices() && scheduler_->device_in_flight().empty();
      },
      spin, nap_for(*transport_, config));
}

void World::start_trace_of_settings() {
  if (!config_.timeline.empty() && rank() == 0) trace().start(config_.timeline, 0, false);
}

std::shared_ptr<World> World::successor(std::exception_ptr error) {
  if (!membership_ || forked() || shut_down_) std::rethrow_exception(error);
  progress_->alone([&] { failures_->fail(error, true); });
  progress_->wait([this] { return retired_ || may_go_on_; }, interrupt_);
  // Must precede the next world's first operation: work still on the device writes to tensors that all worlds share.
  if (!drain_devices(std::chrono::seconds(30)))
    throw DeviceError("the GPU hangs: it did not finish the work of a failed world within 30 s");
  std::shared_ptr<World> next;
  progress_->alone([&] {
    if (retired_) throw UsageError("another thread has already created the successor of this world");
    if (membership_->ended()) std::rethrow_exception(membership_->reason(view_));
    next = std::shared_ptr<World>(new World(position_in(membership_), config_, services_->tags()));
    next->interrupt_ = interrupt_;
    retired_ = true;  // only now: if there is no memory for the next world, this one still announces that it leaves
  });
  progress_->stop();
  return next;
}

World::~World() {
  shutdown();
  scheduler_->leave_blocks();
  messages_->leave_boxes();
  scheduler_->keep_given_up();  // links outlive a world, and may still use the memory of its transfers
  if (retired_ || failed()) {
    services_->keep();
    messages_->keep();
  }
  if (forked()) {
    // The thread exists in the parent only, and so does the work in flight: GPUs and NCCL do not survive a fork.
    leak_intentionally(std::move(progress_));
    leak_intentionally(std::move(scheduler_));
    leak_intentionally(std::move(messages_));
  }
}

std::shared_ptr<Handle> World::submit(Request request) {
  auto handle = submit_to_wait(std::move(request));
  if (!progress_->expects_wait() || !progress_->try_alone([this] { begin_submitted(); })) progress_->notify();
  return handle;
}

// Announces new submissions or enters turns with them, and ends the turns that are over.
void World::begin_submitted() {
  if (retired_) return;
  try {
    scheduler_->announce();
    scheduler_->end_turns();
  } catch (...) {
    failures_->caught(std::current_exception());
  }
}

std::shared_ptr<Handle> World::submit_to_wait(Request request) {
  require_own_process();
  return scheduler_->submit(std::move(request));
}

void World::require_own_process() const {
  if (!forked()) return;
  throw UsageError(
      "this process was forked after init(), so it is not a rank. Communicate from the parent, or start workers before "
      "init() or with the 'spawn' method");
}

std::vector<int> World::members(int set) const {
  require_own_process();
  return scheduler_->members(set);
}

std::vector<int> World::sets() const {
  require_own_process();
  return scheduler_->set_ids();
}

std::vector<std::string> World::names_in_flight() const {
  require_own_process();
  return scheduler_->names_in_flight();
}

void World::wait(const Handle& handle) {
  require_own_process();
  const auto over = [&] {
    if (!handle.done()) return false;
    if (!membership_ || handle.error || !handle.event || handle.undone) return true;
    if (!handle.event->done()) return false;
    const auto barrier = handle.barrier.lock();
    return !barrier || barrier->let_go().empty();  // otherwise this world is about to fail, so wait for that
  };
  progress_->note_wait();
  if (over()) return;
  const Time begin = steady_clock::now();
  try {
    progress_->wait(over, interrupt_);
  } catch (...) {
    // A handle without an operation is a promise: other ranks do not wait for it.
    std::string name = scheduler_->operation_of(handle);
    if (name.empty()) progress_->alone([&] { name = messages_->text_of(handle); });
    if (!name.empty()) interrupted(name);
    throw;
  }
  count_wait(begin);
}

// Ends the world because a wait for this operation was interrupted.
void World::interrupted(const std::string& operation) {
  const auto failure = std::make_exception_ptr(TransportError(
      "rank " + std::to_string(rank()) + " was interrupted by a signal while it waited for '" + operation +
      "', and did not take its result. So ranks may be at different places of the program. Call shutdown() and "
      "init(), then broadcast the parameters or load a checkpoint"));
  progress_->alone([&] { failures_->fail(failure, true); });
  flush(milliseconds(100));
}

void World::count_wait(Time begin) {
  const Time now = steady_clock::now();
  waited_ns_.fetch_add(static_cast<std::uint64_t>(std::chrono::nanoseconds(now - begin).count()));
  if (common_.ledger.keeps_spans()) common_.ledger.note(Ledger::What::kWait, begin, now, -1, 0, "");
}

void World::open_ledger(bool opened) {
  common_.traffic.open(opened, static_cast<std::size_t>(size()));
  common_.ledger.open(opened);
}

World::Found World::find(int set, std::string_view name, const Signature& what) {
  if (forked()) return {};
  Found found{nullptr, progress_->try_turn()};
  if (found.turn) found.repeat = scheduler_->find(set, name, what);
  if (!found.repeat) found.turn = {};
  return found;
}

bool World::repeat(int set, Found what, const std::byte* input, std::byte* output,
                   const std::function<void()>& before_waiting) {
  auto turn = what.turn ? std::move(what.turn) : progress_->try_turn();
  if (!turn) return false;
  const std::shared_ptr<ProcessSet> entered = scheduler_->enter_call(set, what.repeat, input, output);
  if (!entered) return false;
  const bool timed = common_.ledger.open_now();
  const Time begin = timed ? steady_clock::now() : Time{};
  bool waiting = !before_waiting;
  using Collected = Scheduler::Collected;
  auto result = Collected::kHalf;
  while (result == Collected::kHalf) {
    if (!waiting && !is_over_soon(*entered->one_shot())) {
      before_waiting();
      waiting = true;
    }
    wait_for_turn(turn, *entered, what.repeat->name);
    try {
      result = scheduler_->collect(*entered, input, output);
    } catch (...) {
      failures_->caught(std::current_exception());
      result = Collected::kNothing;  // so the caller submits it, which throws the failure
    }
  }
  if (timed) common_.ledger.beside(begin, steady_clock::now());
  if (scheduler_->posting()) progress_->notify();
  return result == Collected::kAll;
}

// Reads up to kFirstLooks times whether a turn is over. Reads once if ranks share cores, or if this rank is a leader,
// whose turn ends only by polling.
bool World::is_over_soon(const OneShot& shot) const {
  const bool spins = patience_ > 0 && !shot.relays();
  for (int look = 1; spins && look < kFirstLooks && !shot.over(); ++look) relax();
  return shot.over();
}

// Waits until the turn that this rank has entered for a call is over, or never will be. `polling`: the caller's right
// to poll.
void World::wait_for_turn(std::unique_lock<std::mutex>& polling, ProcessSet& entered, const std::string& name) {
  OneShot& shot = *entered.one_shot();
  const int looks = shot.relays() ? 0 : std::max(patience_, kLooks);
  for (int look = 0; look < looks && !shot.over(); ++look) {
    if (patience_ > 0) {
      relax();
    } else {
      sched_yield();  // to the ranks that share this core
    }
  }
  if (shot.over()) return;
  const Time begin = steady_clock::now();
  shot.rest(true);
  const auto over = [&] { return shot.over() || shot.in_vain() || common_.failure.latched(); };
  try {
    progress_->poll_until(polling, over, shot.relays() ? 0 : kLooks, interrupt_);
  } catch (...) {
    progress_->alone([&] { scheduler_->give_up_entered(entered); });
    interrupted(name);
    throw;
  }
  shot.rest(false);
  count_wait(begin);
}

bool World::reaches(int rank, const Location& place, const std::shared_ptr<Device>& device) {
  bool reached = place.segment != 0;
  progress_->alone([&] {
    try {
      if (reached && rank != this->rank()) node_memory().map(rank, place, device);
    } catch (const TransportError&) {
      reached = false;
    }
  });
  return reached;
}

void World::open_service(int number, std::shared_ptr<Service> service) {
  require_own_process();
  progress_->alone([&] { services_->open(number, std::move(service)); });
  progress_->notify();
}

void World::close_service(int number) {
  if (forked()) return;
  progress_->alone([&] { services_->close(number, !shut_down_ && !failed()); });
}

// First waits until no work is in flight on devices, and no operation is in two turns: a loss would still fail the
// whole world.
void World::tolerate_losses() {
  require_own_process();
  const auto may_begin = [this] {
    return common_.failure.latched() || (scheduler_->device_in_flight().empty() && !scheduler_->in_two_turns());
  };
  for (bool begun = false; !begun;) {
    progress_->wait(may_begin, interrupt_);
    progress_->alone([&] {
      begun = may_begin();
      if (begun) common_.peers.tolerate_losses();
    });
  }
}

void World::set_timeout(int set, double seconds) {
  require_own_process();
  if (!(seconds > 0)) throw UsageError("the timeout of a process set must be above 0 s, not " + brief(seconds) + " s");
  progress_->alone([&] {
    const auto found = scheduler_->sets().find(set);
    if (found == scheduler_->sets().end()) throw UsageError("there is no process set " + std::to_string(set));
    found->second->timeout_s = seconds;
  });
}

// ---- polling -------------------------------------------------------------------------------------------------------

bool World::poll() {
  if (retired_) return false;
  try {
    bool moved = scheduler_->announce();
    moved |= transport_->poll(receive_);
    if (membership_) may_go_on_ = membership_->ended() || membership_->past(view_.epoch);
    moved |= scheduler_->decide();
    const Time now = steady_clock::now();
    moved |= scheduler_->decline(now);
    moved |= scheduler_->relay(now);
    moved |= scheduler_->end_turns();
    moved |= scheduler_->advance();
    moved |= services_->advance(now);
    moved |= messages_->advance();
    if (moved) last_move_ = now;
    if (now - last_watch_ > kWatchEvery) {
      last_watch_ = now;
      common_.clock.tick(now);
      tell_freed();
      failures_->watch(common_.clock.now());
      waits_.answer([this] { return failures_->waits(common_.clock.now()); });
    }
    return moved;
  } catch (...) {
    failures_->caught(std::current_exception());
    return true;
  }
}

void World::receive(int from, std::span<const std::byte> bytes) {
  Reader reader(bytes);
  switch (reader.one_of(kLastMessage)) {
    case Message::kAnnounce:
    case Message::kDecision:
    case Message::kStalled:
    case Message::kSharedBlock:
    case Message::kOneShot:
    case Message::kGaveUp:
    case Message::kReleased: scheduler_->receive(from, bytes); break;
    case Message::kFreed:
      for (const std::uint64_t segment : reader.list<std::uint64_t>()) node_memory().unmap(from, segment);
      break;
    case Message::kBye: failures_->receive_goodbye(from, reader); break;
    case Message::kMessage: messages_->receive(from, reader); break;
    case Message::kService: services_->receive(from, reader); break;
    case Message::kClosed: services_->receive_closed(from, reader); break;
    case Message::kFailed: failures_->receive_failure(from, reader); break;
  }
}

Work World::work() const {
  if (scheduler_->busy() || scheduler_->posting() || services_->any() || messages_->busy()) return Work::kUnderWay;
  // Without doorbells, messages that MPI has buffered leave only when a thread polls. So polling continues for kLinger
  // after the last move.
  constexpr milliseconds kLinger{5};
  const bool remains =
      scheduler_->awaited() || (!transport_->rings_always() && steady_clock::now() - last_move_.load() < kLinger);
  return remains ? Work::kRemains : Work::kNone;
}

// Tells node peers to unmap memory of this rank that has been freed. They ignore messages of a failed world, so then
// the next world does this.
void World::tell_freed() {
  if (failed()) return;
  const std::vector<std::uint64_t> freed = node_memory().take_freed();
  if (!freed.empty()) common_.peers.post_to_node(Writer().put(Message::kFreed).put(freed).take());
}

}  // namespace sordino
