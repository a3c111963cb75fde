// A world's life, and what its users call. What moves its work is in world_poll.cc, what ends it in world_failure.cc.
#include "collectives/world.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "base/keep.h"
#include "collectives/control.h"
#include "transport/nccl/loader.h"

namespace sordino {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

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

World::World(std::unique_ptr<Transport> transport, const Config& config) : config_(config) {
  if (config.outlast) {
    membership_ = std::make_shared<membership::Membership>(std::move(transport), config.silence_s);
    view_ = membership_->view();
    transport_ = membership_->enter();
  } else {
    transport_ = std::move(transport);
    for (int rank = 0; rank < size(); ++rank) view_.members.push_back(rank);
  }
  begin();
}

World::World(std::shared_ptr<membership::Membership> membership, const World& before)
    : config_(before.config_),
      membership_(std::move(membership)),
      view_(membership_->view()),
      transport_(membership_->enter()),
      tags_(before.tags_) {
  begin();
}

void World::begin() {
  gone_.assign(static_cast<std::size_t>(size()), false);
  staging_ = std::make_unique<Staging>(transport_->node_memory());
  std::vector<int> everybody(static_cast<std::size_t>(size()));
  for (int rank = 0; rank < size(); ++rank) everybody[static_cast<std::size_t>(rank)] = rank;
  add_set(0, std::move(everybody));
  if (!config_.timeline.empty() && rank() == 0 && view_.epoch == 0) trace_.start(config_.timeline, 0, false);
  progress_ = std::make_unique<Progress>(
      *transport_, [this] { return poll(); }, [this] { return busy(); },
      [this] { return transport_->rings_always() && on_devices_.load() == 0; }, spin_for(*transport_, config_));
}

std::shared_ptr<World> World::succeed(std::exception_ptr error) {
  if (!membership_ || forked() || shut_down_) std::rethrow_exception(error);
  progress_->alone([&] { fail(error, true); });
  progress_->wait([this] { return retired_ || may_succeed_; });
  std::shared_ptr<World> next;
  progress_->alone([&] {
    if (retired_) throw UsageError("another thread has taken this world's place already");
    if (membership_->ended()) std::rethrow_exception(membership_->reason(view_));
    retired_ = true;
    next = std::shared_ptr<World>(new World(membership_, *this));
  });
  progress_->stop();
  return next;
}

World::~World() {
  shutdown();
  for (auto& [id, set] : sets_) set->leave_desk();
  if (retired_) {
    // MPI may still write to what transfers of this world were for.
    keep_for_ever(std::move(graveyard_));
    keep_for_ever(std::move(services_));
    keep_for_ever(std::move(closed_));
  }
  if (forked()) {
    // The thread exists in the parent only, and so does what is under way: GPUs and NCCL do not survive a fork.
    keep_for_ever(std::move(progress_));
    keep_for_ever(std::move(sets_));
    keep_for_ever(std::move(graveyard_));
    keep_for_ever(std::move(flying_));
    keep_for_ever(std::move(staging_));
  }
}

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
    if (request.kind == Kind::kRemoveSet) require_idle(static_cast<int>(request.splits.at(0)));
    const auto [place, added] = outstanding_.try_emplace(key_of(request.set, request.name));
    if (!added) {
      throw UsageError("an operation named '" + request.name +
                       "' is still under way on this rank; wait for it, or give this one "
                       "another name");
    }
    in_flight_.fetch_add(1);
    if (request.device) on_devices_.fetch_add(1);
    submitted_.push_back({std::move(request), handle, steady_clock::now(), false});
    submitted_any_ = true;
  }
  return handle;
}

void World::require_idle(int set) const {
  const std::string prefix = key_of(set, "");
  for (const auto& [key, submission] : outstanding_) {
    if (!key.starts_with(prefix)) continue;
    throw UsageError("process set " + std::to_string(set) + " cannot be removed while '" + key.substr(prefix.size()) +
                     "' is under way on it");
  }
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

Abilities World::abilities(const Device& device) const {
  const auto allowed = [this](const char* route) { return config_.gpu_route.empty() || config_.gpu_route == route; };
  Abilities all = 0;
  if (allowed("ipc") && transport_->shares_memory()) all |= kMapsDevices;
  if (allowed("mpi") && transport_->takes_device_memory()) all |= kSendsDevices;
  if (allowed("nccl") && device.takes_nccl() && has_nccl()) all |= kNccl;
  return all;
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

bool World::has_nccl() const {
  std::call_once(asked_nccl_, [this] { has_nccl_ = nccl::available(); });
  return has_nccl_;
}

std::map<std::string, std::uint64_t> World::routes() const {
  std::lock_guard lock(mutex_);
  return routes_;
}

void World::shutdown() {
  if (forked() || shut_down_.exchange(true)) return;
  progress_->stop();
  if (retired_) return;
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
    const Time limit = steady_clock::now() + std::chrono::seconds(1);
    progress_->alone([this] { poll(); });
    progress_->wait([&] { return settled() || steady_clock::now() > limit; });
    const Bytes bye = Writer().put(Message::kBye).take();
    progress_->alone([&] {
      try {
        for (int peer = 0; peer < size(); ++peer) {
          if (peer != rank() && !gone_[static_cast<std::size_t>(peer)]) transport_->post(peer, bye);
        }
        if (membership_) membership_->say_goodbye();
      } catch (const Error&) {
        transport_->abandon();  // a peer has died meanwhile; there is nobody to say goodbye to
      }
    });
    flush(milliseconds(1000));
  }
  if (failed && membership_) {
    progress_->alone([this] { membership_->depart("it has shut down"); });
    flush(milliseconds(200));
  }
  progress_->alone([this] {
    fail(std::make_exception_ptr(Error("Sordino has been shut down")), false);
    // Here, where all ranks come: NCCL's communicators are closed together.
    flying_.clear();
    for (auto& [id, set] : sets_) set->channels.clear();
  });
  trace_.stop();
}

void World::abort(const std::string& cause) {
  if (forked() || shut_down_) return;
  progress_->stop();
  if (retired_) return;
  const std::string text =
      "rank " + std::to_string(rank()) + " on " + transport_->host_of(rank()) + " has ended: " + cause;
  progress_->alone([&] {
    if (membership_) membership_->depart("it has ended: " + cause);
    fail(std::make_exception_ptr(PeerLost(text, {rank()})), membership_ == nullptr);
  });
  flush(milliseconds(200));
  shut_down_ = true;
}

// Waits until what has been posted has left.
void World::flush(milliseconds limit) {
  const Time end = steady_clock::now() + limit;
  const bool was_broken = broken_;
  progress_->wait([&] { return transport_->idle() || broken_ != was_broken || steady_clock::now() > end; });
}

bool World::busy() const {
  // Without bells, what MPI has buffered leaves only when somebody polls, so go on a little after the last move.
  constexpr milliseconds kLinger{5};
  return in_flight_.load() > 0 || serves_.load() ||
         (!transport_->rings_always() && steady_clock::now() - last_move_.load() < kLinger);
}

void World::outlive_peers() {
  progress_->alone([this] {
    outlives_ = true;
    transport_->outlive_peers();
  });
}

void World::open_service(int number, std::shared_ptr<Service> service) {
  if (forked()) throw UsageError("this process was forked after init(), so it is no rank");
  progress_->alone([&] {
    services_[number] = service;
    serves_ = true;
    std::exception_ptr failure;
    {
      std::lock_guard lock(mutex_);
      failure = failure_;
    }
    if (failure) service->end(failure);
  });
  progress_->notify();
}

void World::close_service(int number) {
  if (forked()) return;
  progress_->alone([&] {
    const auto found = services_.find(number);
    if (found == services_.end()) return;
    found->second->end(std::make_exception_ptr(UsageError("the service has been closed")));
    const Bytes closed = Writer().put(Message::kClosed).put(number).take();
    for (int peer = 0; peer < size() && !shut_down_ && !broken_; ++peer) {
      if (peer != rank() && !gone_[static_cast<std::size_t>(peer)]) transport_->post(peer, closed);
    }
    closed_.push_back({std::move(found->second), steady_clock::now()});
    services_.erase(found);
    serves_ = !services_.empty();
  });
}

void World::post_to_service(int number, int to, const Bytes& message) {
  if (gone_[static_cast<std::size_t>(to)]) return;
  Bytes whole = Writer().put(Message::kService).put(number).take();
  whole.insert(whole.end(), message.begin(), message.end());
  transport_->post(to, std::move(whole));
}

Tag World::next_tag() {
  return static_cast<Tag>(kTagSets) << kTagSequenceBits | static_cast<Tag>(tags_++ & ((1 << kTagSequenceBits) - 1));
}

void World::count_sent(int to, std::size_t bytes) {
  const auto& node_of = transport_->node_of();
  const bool same_node = node_of[static_cast<std::size_t>(to)] == node_of[static_cast<std::size_t>(rank())];
  (same_node ? traffic_.inside : traffic_.across).fetch_add(bytes, std::memory_order_relaxed);
}

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
  for (int peer = 0; peer < size(); ++peer) {
    if (gone_[static_cast<std::size_t>(peer)]) tell_left(set, peer);
  }
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

}  // namespace sordino
