#include "transport/process/leaving.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>
#include <vector>

#include "base/error.h"
#include "transport/shm/memory.h"

namespace sordino::process {
namespace {

using Clock = std::chrono::steady_clock;
using Flag = std::atomic<std::uint32_t>;

struct Peer {
  int pidfd;
  const Flag* left;
};

struct State {
  shm::ShmMemory memory;  // in which a peer's rank is its process number
  std::shared_ptr<Segment> board;
  std::map<pid_t, Peer> peers;
  std::vector<std::shared_ptr<Segment>> kept;
  double most_s = 0;
  bool waits = true;
  pid_t process = getpid();
};

// Never destroyed: it is looked at when the process ends, and what it keeps goes with that.
State& state() {
  static State& only = *new State;
  return only;
}

bool gone(const Peer& peer) {
  if (peer.left->load(std::memory_order_acquire) != 0) return true;
  pollfd end{peer.pidfd, POLLIN, 0};
  return ::poll(&end, 1, 0) == 1;
}

void leave() {
  State& self = state();
  if (getpid() != self.process) return;  // a forked child
  reinterpret_cast<Flag*>(self.board->data)->store(1, std::memory_order_release);
  if (!self.waits) return;
  const auto limit = Clock::now() + std::chrono::duration<double>(self.most_s);
  auto nap = std::chrono::microseconds(100);
  for (const auto& [pid, peer] : self.peers) {
    while (!gone(peer) && Clock::now() < limit) {
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
  const auto known = self.peers.find(peer);
  if (known != self.peers.end() && !gone(known->second)) return;
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, peer, 0));
  if (pidfd < 0) return;                                      // it is gone already
  if (known != self.peers.end()) close(known->second.pidfd);  // another process had the number
  self.peers.erase(peer);
  self.memory.unmap(peer, board.segment);
  self.memory.introduce(peer, peer);
  try {
    self.peers.insert_or_assign(peer, Peer{pidfd, reinterpret_cast<Flag*>(self.memory.map(peer, board))});
  } catch (const TransportError&) {
    close(pidfd);
  }
}

void will_not_wait() { state().waits = false; }

}  // namespace sordino::process
