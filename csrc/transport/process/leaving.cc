#include "transport/process/leaving.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>
#include <vector>

#include "base/awake_clock.h"
#include "base/error.h"
#include "transport/process/process_watch.h"
#include "transport/shm/memory.h"

namespace sordino::process {
namespace {

using Flag = std::atomic<std::uint32_t>;

struct Peer {
  ProcessWatch process;
  std::uint64_t segment;  // its board
  const Flag* left;
};

struct State {
  shm::ShmMemory memory;  // whose ranks are process ids
  std::shared_ptr<Segment> board;
  std::map<pid_t, Peer> peers;
  std::vector<std::shared_ptr<Segment>> kept;
  double most_s = 0;
  bool waits = true;
  pid_t process = getpid();
};

// Never destroyed: it is used when the process ends, and its memory goes with the process.
State& state() {
  static State& only = *new State;
  return only;
}

bool gone(Peer& peer) { return peer.left->load(std::memory_order_acquire) != 0 || peer.process.ended(); }

// Forgets peers that have ended, so that a process whose peers come and go does not keep a descriptor for each.
void forget_the_gone() {
  State& self = state();
  for (auto one = self.peers.begin(); one != self.peers.end();) {
    auto& [pid, peer] = *one;
    if (peer.process.ended()) {
      self.memory.unmap(pid, peer.segment);
      one = self.peers.erase(one);
    } else {
      ++one;
    }
  }
}

void leave() {
  State& self = state();
  if (getpid() != self.process) return;  // a forked child
  reinterpret_cast<Flag*>(self.board->data)->store(1, std::memory_order_release);
  if (!self.waits) return;
  Deadline limit{std::chrono::duration<double>(self.most_s)};
  auto nap = std::chrono::microseconds(100);
  for (auto& [pid, peer] : self.peers) {
    while (!gone(peer) && !limit.passed()) {
      std::this_thread::sleep_for(nap);
      nap = std::min<std::chrono::microseconds>(nap * 2, std::chrono::milliseconds(10));
    }
  }
}

}  // namespace

void keep_until_the_end(std::shared_ptr<Segment> segment) { state().kept.push_back(std::move(segment)); }

Location own_board() {
  State& self = state();
  if (!self.board) {
    self.board = self.memory.allocate(sizeof(Flag));
    std::atexit(leave);
  }
  return self.memory.locate(self.board->data, self.board->bytes);
}

void will_wait_for(pid_t peer, const Location& board, double most_s) {
  if (board.segment == 0) return;
  State& self = state();
  self.most_s = std::max(self.most_s, most_s);
  forget_the_gone();
  const auto known = self.peers.find(peer);
  if (known != self.peers.end() && !gone(known->second)) return;
  ProcessWatch process(peer);
  if (process.ended()) return;
  self.peers.erase(peer);  // another process had this id
  self.memory.unmap(peer, board.segment);
  self.memory.introduce(peer, peer);
  try {
    const auto* left = reinterpret_cast<const Flag*>(self.memory.map(peer, board));
    self.peers.emplace(peer, Peer{std::move(process), board.segment, left});
  } catch (const MemoryGone&) {
    // It has ended meanwhile.
  }
}

void will_not_wait() { state().waits = false; }

}  // namespace sordino::process
