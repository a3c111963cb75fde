// Memory of a world that this process has left stays until all peers have left that world, and no longer. Peers are
// this process itself, which maps its own board, and forked children.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>

#include "check.h"
#include "transport/process/leaving.h"
#include "transport/shm/memory.h"

using namespace sordino;
using process::Presence;

namespace {

std::weak_ptr<Segment> kept_by(Presence& presence) {
  shm::ShmMemory memory;
  auto segment = memory.allocate(4096);
  std::weak_ptr<Segment> seen = segment;
  presence.keep(std::move(segment));
  return seen;
}

void a_peer_that_stays_longer() {
  std::optional<Presence> ours(std::in_place), peers(std::in_place);
  ours->share_with(getpid(), Presence::board(), peers->number());
  const auto kept = kept_by(*ours);
  ours.reset();
  CHECK(!kept.expired());
  {
    Presence another;  // a later world frees nothing of this one
    CHECK(!kept.expired());
  }
  CHECK(!kept.expired());
  peers.reset();
  CHECK(kept.expired());
}

void a_peer_that_has_left_before() {
  std::optional<Presence> ours(std::in_place), peers(std::in_place);
  ours->share_with(getpid(), Presence::board(), peers->number());
  const auto kept = kept_by(*ours);
  peers.reset();
  CHECK(!kept.expired());  // this process itself is still in the world
  ours.reset();
  CHECK(kept.expired());
}

// The peer leaves a later world first. Only the world that it shares with this process counts.
void worlds_that_are_left_in_another_order() {
  std::optional<Presence> ours(std::in_place), peers(std::in_place), later(std::in_place);
  ours->share_with(getpid(), Presence::board(), peers->number());
  const auto kept = kept_by(*ours);
  ours.reset();
  later.reset();
  CHECK(!kept.expired());
  peers.reset();
  CHECK(kept.expired());
}

// Another program runs under the peer's process number, so it has another board.
void a_peer_that_was_replaced() {
  std::optional<Presence> ours(std::in_place), peers(std::in_place);
  const Location board = Presence::board();
  ours->share_with(getpid(), board, peers->number());
  const auto kept = kept_by(*ours);
  ours.reset();
  CHECK(!kept.expired());
  Location other = board;
  ++other.file;
  Presence next;
  next.share_with(getpid(), other, 0);  // this board cannot be mapped
  CHECK(kept.expired());
}

// A board that cannot be mapped: the peer counts as in the world until its process ends, which this one does not.
void a_peer_without_a_board() {
  std::optional<Presence> ours(std::in_place), peers(std::in_place);
  Location none = Presence::board();
  none.segment = 0;
  none.file = 0;
  ours->share_with(getpid(), none, peers->number());
  const auto kept = kept_by(*ours);
  ours.reset();
  peers.reset();
  CHECK(!kept.expired());
  Presence next;
  next.share_with(getpid(), Presence::board(), next.number());  // another program, with a board
  CHECK(kept.expired());
}

struct Told {
  Location board;
  std::uint64_t number;
};

// The child is in the world until it is killed. Before that a grandchild, which has inherited the world, drops it.
void a_peer_that_is_killed() {
  int told[2];
  CHECK(pipe(told) == 0);
  const pid_t child = fork();
  if (child == 0) {
    auto* world = new Presence;
    const Told mine{Presence::board(), world->number()};
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      delete world;
      _exit(0);
    }
    waitpid(grandchild, nullptr, 0);
    if (write(told[1], &mine, sizeof mine) != sizeof mine) _exit(1);
    for (;;) pause();
  }
  Told peer{};
  CHECK(read(told[0], &peer, sizeof peer) == sizeof peer);
  std::optional<Presence> ours(std::in_place);
  CHECK(peer.board.file != Presence::board().file);
  ours->share_with(child, peer.board, peer.number);
  const auto kept = kept_by(*ours);
  ours.reset();
  {
    Presence another;
  }
  CHECK(!kept.expired());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  {
    Presence another;
  }
  CHECK(kept.expired());
  close(told[0]);
  close(told[1]);
}

// Returns the seconds until the end of a child that shares memory with this process, which stays.
double end_of_a_child(bool (*prepare)(pid_t peer)) {
  const Location board = Presence::board();
  Presence ours;
  const pid_t parent = getpid();
  const auto begin = std::chrono::steady_clock::now();
  const pid_t child = fork();
  if (child == 0) {
    Presence theirs;
    Presence::board();
    theirs.share_with(parent, board, ours.number());
    std::exit(prepare(parent) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A process waits at its end for the peers of its last world, even if an earlier world has failed.
void a_process_that_has_given_up_waiting_once() {
  constexpr double kLimit = 1.0;
  CHECK(end_of_a_child([](pid_t peer) {
          process::will_wait_for(peer, kLimit);
          process::will_not_wait();
          return true;
        }) < kLimit);
  CHECK(end_of_a_child([](pid_t peer) {
          process::will_wait_for(peer, kLimit);
          process::will_not_wait();
          process::will_wait_for(peer, kLimit);
          return true;
        }) >= kLimit);
}

}  // namespace

int main() {
  a_peer_that_stays_longer();
  a_peer_that_has_left_before();
  worlds_that_are_left_in_another_order();
  a_peer_that_was_replaced();
  a_peer_without_a_board();
  a_peer_that_is_killed();
  a_process_that_has_given_up_waiting_once();
  return test::report();
}
