#include "transport/process/leaving.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "base/awake_clock.h"
#include "base/error.h"
#include "base/keep.h"
#include "transport/process/process_watch.h"
#include "transport/shm/memory.h"

namespace sordino::process {

namespace {

struct Board {
  std::atomic<std::uint32_t> ended;
  std::atomic<std::uint64_t> left;  // the process has left all worlds with lower numbers
};

}  // namespace

struct Peer {
  ProcessWatch process;
  Location place;                // of its board
  const Board* board = nullptr;  // mapped until the process is gone; null if that was not possible
  bool replaced = false;         // the process runs another program by now, which has its own board
  bool waited_for = false;

  bool gone() { return replaced || process.ended(); }
  bool has_left(std::uint64_t world) {
    return gone() || (board && board->left.load(std::memory_order_acquire) > world);
  }
  bool has_come_to_its_end() { return gone() || !board || board->ended.load(std::memory_order_acquire) != 0; }
};

namespace {

// Memory of a world that this process has left.
struct Kept {
  std::vector<std::pair<std::shared_ptr<Peer>, std::uint64_t>> peers;  // and their numbers of the world
  std::vector<std::shared_ptr<Segment>> segments;
};

struct State {
  std::mutex mutex;
  shm::ShmMemory memory;  // whose ranks are process ids
  std::shared_ptr<Segment> board;
  std::map<pid_t, std::shared_ptr<Peer>> peers;
  std::uint64_t next = 0;          // number of the next world
  std::set<std::uint64_t> worlds;  // that this process is in
  std::vector<Kept> kept;
  double most_s = 0;
  const pid_t process = getpid();

  Board* own() const { return reinterpret_cast<Board*>(board->data); }
};

// Never destroyed: it is used when the process ends, and its memory goes with the process. A forked child has its own,
// so that it does not write to its parent's board.
State& state() {
  static std::atomic<State*> only = nullptr;
  State* found = only.load();
  if (found && found->process == getpid()) return *found;
  auto* made = new State;
  if (only.compare_exchange_strong(found, made)) {
    if (found) leak_intentionally(found);  // the parent's
    return *made;
  }
  delete made;  // another thread was first
  return *found;
}

// Forgets peers that have ended, so that a process whose peers come and go does not keep a descriptor for each, and
// frees memory of worlds that all have left.
void sweep(State& self) {
  std::erase_if(self.kept, [](Kept& one) {
    return std::ranges::all_of(one.peers, [](auto& entry) { return entry.first->has_left(entry.second); });
  });
  std::erase_if(self.peers, [&self](auto& entry) {
    auto& [pid, peer] = entry;
    if (!peer->gone()) return false;
    if (peer->board) self.memory.unmap(pid, peer->place.segment);
    return true;
  });
}

void leave() {
  State& self = state();
  if (!self.board) return;  // a forked child without worlds
  self.own()->ended.store(1, std::memory_order_release);
  std::vector<std::shared_ptr<Peer>> awaited;
  {
    std::lock_guard lock(self.mutex);
    for (auto& [pid, peer] : self.peers) {
      if (peer->waited_for) awaited.push_back(peer);
    }
  }
  const auto is_gone = [&self](Peer& peer) {
    std::lock_guard lock(self.mutex);
    return peer.has_come_to_its_end();
  };
  Deadline limit{std::chrono::duration<double>(self.most_s)};
  auto nap = std::chrono::microseconds(100);
  for (auto& peer : awaited) {
    while (!is_gone(*peer) && !limit.passed()) {
      std::this_thread::sleep_for(nap);
      nap = std::min<std::chrono::microseconds>(nap * 2, std::chrono::milliseconds(10));
    }
  }
}

std::uint64_t enter() {
  State& self = state();
  std::lock_guard lock(self.mutex);
  sweep(self);
  self.worlds.insert(self.next);
  return self.next++;
}

}  // namespace

Presence::Presence() : number_(enter()) {}

Presence::~Presence() {
  State& self = state();
  std::lock_guard lock(self.mutex);
  self.worlds.erase(number_);
  if (self.board) {
    const std::uint64_t left = self.worlds.empty() ? self.next : *self.worlds.begin();
    self.own()->left.store(left, std::memory_order_release);
  }
  if (!kept_.empty()) self.kept.push_back({std::move(peers_), std::move(kept_)});
  sweep(self);
}

Location Presence::board() {
  State& self = state();
  std::lock_guard lock(self.mutex);
  if (!self.board) {
    self.board = self.memory.allocate(sizeof(Board));
    std::atexit(leave);
  }
  return self.memory.locate(self.board->data, self.board->bytes);
}

void Presence::share_with(pid_t peer, const Location& board, std::uint64_t number) {
  State& self = state();
  std::lock_guard lock(self.mutex);
  auto known = self.peers.find(peer);
  if (known != self.peers.end() && known->second->place.file != board.file) known->second->replaced = true;
  sweep(self);
  known = self.peers.find(peer);
  if (known == self.peers.end()) {
    auto made = std::make_shared<Peer>(Peer{ProcessWatch(peer), board});
    if (made->gone()) return;
    self.memory.introduce(peer, peer);
    try {
      if (board.segment != 0) made->board = reinterpret_cast<const Board*>(self.memory.map(peer, board));
    } catch (const MemoryGone&) {
      // It has ended meanwhile; or else it counts as a member of this world until it ends.
    }
    known = self.peers.emplace(peer, std::move(made)).first;
  }
  peers_.emplace_back(known->second, number);
}

void will_wait_for(pid_t peer, double most_s) {
  State& self = state();
  std::lock_guard lock(self.mutex);
  self.most_s = std::max(self.most_s, most_s);
  if (const auto known = self.peers.find(peer); known != self.peers.end()) known->second->waited_for = true;
}

void will_not_wait() {
  State& self = state();
  std::lock_guard lock(self.mutex);
  for (auto& [pid, peer] : self.peers) peer->waited_for = false;
}

}  // namespace sordino::process
