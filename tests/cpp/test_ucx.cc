// The link by UCX between real processes, which meet in shared memory.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <new>
#include <thread>

#include "base/keep.h"
#include "check.h"
#include "transport/ucx/plugin.h"

using namespace sordino;

namespace {

constexpr int kMostRanks = 3, kMostMeetings = 8;
constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;

Bytes pattern(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 131 + static_cast<std::size_t>(seed));
  return bytes;
}

// Memory of transfers that are given up, which UCX may use as long as the process lives.
std::span<std::byte> kept(std::size_t size) {
  auto bytes = std::make_unique<Bytes>(size);
  const std::span<std::byte> memory(*bytes);
  leak_intentionally(std::move(bytes));
  return memory;
}

// State that the processes of a test share besides the link: counters, and data that each has shown.
struct Board {
  struct Slot {
    std::atomic<int> bytes{-1};
    std::byte data[8 * kKiB];
  };
  Slot shown[kMostMeetings][kMostRanks];
  std::atomic<int> arrived{0}, sent{0};
};

void wait_until(const std::function<bool()>& reached) {
  while (!reached()) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

class BoardMeeting : public Meeting {
 public:
  BoardMeeting(Board& board, int rank, int size) : board_(board), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<Bytes> gather(Bytes mine) override {
    Board::Slot* shown = board_.shown[time_++];
    if (mine.size() > sizeof(shown->data)) throw Error("there is no room for what is shown");
    std::memcpy(shown[rank_].data, mine.data(), mine.size());
    shown[rank_].bytes = static_cast<int>(mine.size());
    std::vector<Bytes> all;
    for (int rank = 0; rank < size_; ++rank) {
      const Board::Slot& slot = shown[rank];
      wait_until([&] { return slot.bytes >= 0; });
      all.emplace_back(slot.data, slot.data + slot.bytes);
    }
    return all;
  }

 private:
  Board& board_;
  int rank_, size_, time_ = 0;
};

// A rank in its process.
class Rank {
 public:
  Rank(Board& board, int rank, int size, const std::string& token)
      : rank(rank), board(board), meeting_(board, rank, size), token_(token) {
    connect();
  }
  void connect() { link = ucx::connect(meeting_, Config{}, token_); }

  // Waits until `ranks` ranks have come here, for the `time`th time. A rank that does not poll meanwhile delays peers
  // that want to be idle.
  void meet(int ranks, int time, bool polling = false) {
    ++board.arrived;
    wait_until([&] {
      if (polling) poll();
      return board.arrived >= ranks * time;
    });
  }
  void poll() {
    link->poll([this](int from, std::span<const std::byte> message) {
      got[from].emplace_back(message.begin(), message.end());
    });
    for (const Loss& loss : link->take_losses()) losses.push_back(loss);
  }
  void poll_until(const std::function<bool()>& reached) {
    while (!reached()) poll();
  }
  // Returns when all transfers have ended; an error of one of them is thrown.
  void finish(std::vector<std::unique_ptr<Transfer>>& transfers) {
    for (auto& transfer : transfers) poll_until([&] { return transfer->test(); });
  }
  // Exchanges a message and data with a peer that does the same, and had posted nothing else.
  void exchange(int peer, Tag tag, std::size_t bytes = 3 * kMiB) {
    const std::size_t message = exchanged_[peer]++;
    const Bytes mine = pattern(bytes, rank);
    Bytes theirs(bytes);
    link->post(peer, pattern(100, rank));
    std::vector<std::unique_ptr<Transfer>> transfers;
    transfers.push_back(link->receive(peer, tag, theirs));
    transfers.push_back(link->send(peer, tag, mine));
    finish(transfers);
    poll_until([&] { return got[peer].size() > message; });
    CHECK(got[peer][message] == pattern(100, peer));
    CHECK(theirs == pattern(bytes, peer));
  }

  const int rank;
  Board& board;
  std::unique_ptr<Link> link;
  std::map<int, std::vector<Bytes>> got;  // by sender
  std::vector<Loss> losses;

 private:
  BoardMeeting meeting_;
  std::string token_;
  std::map<int, std::size_t> exchanged_;
};

// Runs part(rank) in a process for each rank. Nothing in it has a deadline, but the process is ended after 240 s.
void in_processes(int ranks, const std::function<void(Rank&)>& part, int killed = -1,
                  const std::vector<std::string>& tokens = {"ours", "ours", "ours"}) {
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& board = *new (memory) Board;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    alarm(240);
    const long failed = test::failed;
    try {
      Rank self(board, rank, ranks, tokens[static_cast<std::size_t>(rank)]);
      part(self);
    } catch (const std::exception& error) {
      CHECK(false, "rank", rank, "throws", error.what());
    }
    std::exit(test::failed == failed ? 0 : 1);  // the processes say goodbye here
  }
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    waitpid(children[static_cast<std::size_t>(rank)], &status, 0);
    CHECK(rank == killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                         : WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "rank", rank, "ends with", status);
  }
  munmap(memory, sizeof(Board));
}

[[noreturn]] void die() {
  kill(getpid(), SIGKILL);
  std::abort();
}

// Returns the text of the error with which test() ends.
template <class Expected>
std::string ends_with(Rank& self, Transfer& transfer) {
  try {
    self.poll_until([&] { return transfer.test(); });
  } catch (const Expected& error) {
    CHECK_THROWS(Expected, transfer.test());
    return error.what();
  }
  return "";
}

void control_messages_come_in_order_and_once() {
  constexpr int kMessages = 300;
  const auto size_of_message = [](int i) -> std::size_t {
    if (i % 50 == 7) return 5 * kMiB;
    if (i % 10 == 3) return 70'000;
    return static_cast<std::size_t>(i * 97 % 9'000);
  };
  in_processes(2, [&](Rank& self) {
    const int peer = 1 - self.rank;
    for (int i = 0; i < kMessages; ++i) self.link->post(peer, pattern(i == 0 ? 0 : size_of_message(i), i + self.rank));
    int arrived = 0;
    const auto check_one = [&](int from, std::span<const std::byte> message) {
      const Bytes expected = pattern(arrived == 0 ? 0 : size_of_message(arrived), arrived + peer);
      CHECK(from == peer && std::equal(message.begin(), message.end(), expected.begin(), expected.end()), "message",
            arrived, "of", message.size(), "bytes");
      if (arrived++ % 5 == 0) throw Error("whoever takes it does not like it");
    };
    while (arrived < kMessages || !self.link->idle()) {
      try {
        self.link->poll(check_one);
      } catch (const Error&) {  // each was delivered once; the next ones follow
      }
    }
    self.meet(2, 1, true);
    CHECK(self.got.empty());
    CHECK_THROWS(UsageError, self.link->post(peer, Bytes((std::size_t{1} << 28) + 1)));
  });
}

void transfers_find_their_receives() {
  const std::size_t sizes[] = {0, 1, kKiB, 64 * kKiB, kMiB, 64 * kMiB, 7, 100'003};
  constexpr int kTransfers = 8;
  for (const bool early : {true, false}) {  // whether receives are posted before sends
    in_processes(2, [&](Rank& self) {
      const int peer = 1 - self.rank;
      std::vector<Bytes> mine, theirs;
      for (int i = 0; i < kTransfers; ++i) {
        mine.push_back(pattern(sizes[i], i + self.rank));
        theirs.emplace_back(sizes[i]);
      }
      std::vector<std::unique_ptr<Transfer>> transfers;
      const auto receive = [&] {
        for (const int i : {5, 2, 7, 0, 1, 6, 4, 3})
          transfers.push_back(
              self.link->receive(peer, static_cast<Tag>(1000 * i), theirs[static_cast<std::size_t>(i)]));
      };
      if (early) receive();
      self.meet(2, 1);
      for (int i = 0; i < kTransfers; ++i)
        transfers.push_back(self.link->send(peer, static_cast<Tag>(1000 * i), mine[static_cast<std::size_t>(i)]));
      CHECK(self.link->silent_work());
      self.link->post(peer, pattern(10, self.rank));
      self.poll_until([&] { return !self.got[peer].empty(); });  // it comes after the data, so they are there as well
      if (!early) receive();
      self.finish(transfers);
      for (int i = 0; i < kTransfers; ++i)
        CHECK(theirs[static_cast<std::size_t>(i)] == pattern(sizes[i], i + peer), "transfer", i);
      transfers.clear();
      CHECK(!self.link->silent_work());
      self.poll_until([&] { return self.link->idle(); });
      self.meet(2, 2, true);
    });
  }
}

void other_sizes_than_expected_are_errors() {
  in_processes(2, [](Rank& self) {
    const std::size_t sent[] = {100, 50, 2 * kMiB, 70'000, 0};
    const std::size_t expected[] = {50, 100, kMiB, 2 * kMiB, 1};
    for (Tag tag = 0; tag < 5; ++tag) {
      Bytes memory(std::max(sent[tag], expected[tag]));
      if (self.rank == 0) {
        std::vector<std::unique_ptr<Transfer>> transfers;
        transfers.push_back(self.link->send(1, tag, std::span(memory).first(sent[tag])));
        self.finish(transfers);
      } else {
        auto transfer = self.link->receive(0, tag, std::span(memory).first(expected[tag]));
        const std::string text = ends_with<TransportError>(self, *transfer);
        const std::string few = std::to_string(expected[tag]);
        CHECK(text == (sent[tag] > expected[tag]
                           ? "rank 0 sent more than the " + few + " bytes that were expected"
                           : "rank 0 sent " + std::to_string(sent[tag]) + " bytes where " + few + " were expected"),
              text);
      }
      self.exchange(1 - self.rank, 100);
    }
    CHECK(self.losses.empty());
    self.poll_until([&] { return self.link->idle(); });
    self.meet(2, 1, true);
  });
}

void the_others_go_on_when_one_is_killed() {
  for (const bool tolerates : {false, true}) {
    in_processes(
        3,
        [&](Rank& self) {
          if (tolerates) self.link->tolerate_losses();
          const auto memory = kept(64 * kMiB), other = kept(10), more = kept(64 * kMiB);
          for (const auto& [one, another] : {std::pair(0, 1), std::pair(0, 2), std::pair(1, 2)}) {
            if (self.rank == one) self.exchange(another, 1, 10);
            if (self.rank == another) self.exchange(one, 1, 10);
          }
          std::vector<std::unique_ptr<Transfer>> transfers;
          if (self.rank == 2) {
            Bytes from[] = {Bytes(64 * kMiB), Bytes(64 * kMiB)};
            for (const int peer : {0, 1}) transfers.push_back(self.link->receive(peer, 7, from[peer]));
            for (const int peer : {0, 1}) transfers.push_back(self.link->send(peer, 5, memory));
            self.poll();
            die();  // in the middle of it
          }
          auto sending = self.link->send(2, 7, more);
          auto none = self.link->receive(2, 6, other), half = self.link->receive(2, 5, memory);
          for (Transfer* transfer : {sending.get(), none.get(), half.get()}) {
            const std::string text = ends_with<PeerLost>(self, *transfer);
            const bool done = text.empty() && transfer == half.get();  // all of it had been sent
            CHECK(done || text.starts_with("rank 2 is lost: "), text);
          }
          self.poll_until([&] { return !self.losses.empty(); });
          CHECK(self.losses.size() == 1 && self.losses[0].rank == 2 && !self.losses[0].certain);
          if (tolerates) {
            self.link->post(2, pattern(10, 0));
          } else {
            CHECK_THROWS(PeerLost, self.link->post(2, pattern(10, 0)));
          }
          auto late = self.link->receive(2, 8, other);
          CHECK_THROWS(PeerLost, late->test());
          for (Tag tag = 10; tag < 15; ++tag) self.exchange(1 - self.rank, tag);
          self.poll_until([&] { return self.link->idle(); });
          self.meet(2, 1, true);
        },
        2);
  }
}

void a_transfer_that_is_dropped_does_no_harm() {
  in_processes(2, [](Rank& self) {
    const int peer = 1 - self.rank;
    const std::span<std::byte> memory[] = {kept(64 * kMiB), kept(10), kept(64 * kMiB), kept(10)};
    for (Tag tag = 0; tag < 4; ++tag) {
      const bool sends = (tag < 2) == (self.rank == 0);
      auto transfer = sends ? self.link->send(peer, tag, memory[tag]) : self.link->receive(peer, tag, memory[tag]);
      for (int i = 0; i < 20; ++i) self.poll();
    }
    for (Tag tag = 10; tag < 15; ++tag) self.exchange(peer, tag);
    self.meet(2, 1);
    auto left = self.link->receive(peer, 99, memory[1]);  // a link may end before its transfers
    self.link.reset();
    CHECK_THROWS(Error, left->test());
  });
}

void strangers_are_not_heard() {
  in_processes(3,
               [](Rank& self) {
                 if (self.rank == 2) {
                   for (const int peer : {0, 1}) {
                     for (int i = 0; i < 10; ++i)
                       self.link->post(peer, pattern(static_cast<std::size_t>(i) * 1'000, 1));
                   }
                   self.poll_until([&] { return self.link->idle(); });
                 }
                 self.meet(3, 1, true);  // it has left by now
                 if (self.rank != 2) {
                   for (Tag tag = 0; tag < 20; ++tag) self.exchange(1 - self.rank, tag);
                 }
                 self.meet(3, 2, true);
                 CHECK(!self.got.contains(2) && (self.rank != 2 || self.got.empty()));
                 CHECK(self.losses.empty());
               },
               -1, {"ours", "ours", "another"});
}

// A link that is idle may end: the operating system has every byte that was posted, and UCX holds none back. Messages
// are sent until the connection is full. From then on the sender does nothing, as if it had ended.
void an_idle_link_holds_nothing_back() {
  const std::pair<const char*, const char*> settings[] = {
      {"UCX_TCP_SNDBUF", "8k"},  // about one message, so that the connection fills up in the middle of one
      {"UCX_TCP_RCVBUF", "8k"},
      {"UCX_ZCOPY_THRESH", "inf"},  // UCX copies a message and then counts it as sent
  };
  for (const auto& [name, value] : settings) setenv(name, value, 1);
  in_processes(2, [](Rank& self) {
    self.exchange(1 - self.rank, 1, 10);
    self.poll_until([&] { return self.link->idle(); });
    self.meet(2, 1, true);
    if (self.rank == 0) {
      int posted = 0;
      do {
        self.link->post(1, pattern(7 * kKiB, ++posted));
        for (int i = 0; i < 20; ++i) {  // until all that fits is sent
          self.poll();
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      } while (self.link->idle());
      self.board.sent = posted - 1;  // the last one was not sent as a whole
    }
    self.meet(2, 2);
    if (self.rank == 1) {
      const auto heard = [&] { return static_cast<int>(self.got[0].size()) - 1; };
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
      while (heard() < self.board.sent && std::chrono::steady_clock::now() < end) self.poll();
      CHECK(self.board.sent > 0 && heard() == self.board.sent, "of", self.board.sent.load(), "messages came", heard());
    }
    self.meet(2, 3);
  });
  for (const auto& [name, value] : settings) unsetenv(name);
}

// A process that must not wait for the others, because some of them are lost, ends at once. Messages that it has posted
// arrive even at a rank that does not poll meanwhile, and that sends to it after its end.
void what_was_posted_comes_before_the_end() {
  in_processes(2, [&](Rank& self) {
    const auto post_some = [&] {
      for (int i = 0; i < 5; ++i) self.link->post(1 - self.rank, pattern(1000, i));
    };
    self.exchange(1 - self.rank, 1, 10);
    self.meet(2, 1);
    if (self.rank == 0) {
      post_some();
      for (int i = 0; i < 1000 && !self.link->idle(); ++i) self.poll();  // a world does not wait longer either
      self.meet(2, 2);
      self.meet(2, 3);
      self.link->abandon();  // it has unread messages
      return;
    }
    self.meet(2, 2);
    post_some();
    self.meet(2, 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has ended by then, most likely
    post_some();
    self.poll_until([&] { return !self.losses.empty(); });
    self.poll();
    CHECK(self.got[0].size() == 6, "messages", self.got[0].size());
  });
}

// Worlds come and go in the same processes, and messages of one never reach another.
void a_world_hears_nothing_of_an_earlier_one() {
  in_processes(2, [](Rank& self) {
    const int peer = 1 - self.rank;
    const auto memory = kept(10), large = kept(5 * kMiB);
    std::vector<std::unique_ptr<Transfer>> abandoned;
    for (int world = 0; world < 3; ++world) {
      if (world > 0) self.connect();
      for (Tag tag = 0; tag < 3; ++tag) self.exchange(peer, tag);
      self.meet(2, world + 1);
      self.link->post(peer, pattern(1000, 1));  // they are not read
      self.link->post(peer, Bytes(5 * kMiB));
      abandoned.push_back(self.link->send(peer, 3, memory));
      abandoned.push_back(self.link->receive(peer, 4, large));
      self.link.reset();
    }
    CHECK_THROWS(Error, abandoned[1]->test());
    CHECK(self.losses.empty() && self.got[peer].size() == 9);
  });
}

// A process that ends sends its remaining messages and waits until the others have received them, even if they do not
// poll.
void who_ends_waits_until_all_is_heard() {
  in_processes(2, [](Rank& self) {
    self.exchange(1 - self.rank, 1, 10);
    self.meet(2, 1);
    if (self.rank == 0) {
      for (int i = 0; i < 4; ++i) self.link->post(1, Bytes(5 * kMiB));
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    self.poll_until([&] { return self.got[0].size() == 5 || !self.losses.empty(); });
    CHECK(self.got[0].size() == 5, "messages", self.got[0].size());
  });
}

// A child that a rank forks has the link as well, and does not use it.
void a_forked_child_disturbs_nothing() {
  in_processes(2, [](Rank& self) {
    Bytes memory(10);
    auto transfer = self.link->receive(1 - self.rank, 50, memory);
    const pid_t child = fork();
    if (child == 0) {
      self.link.reset();
      transfer.reset();
      std::exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
    for (Tag tag = 0; tag < 3; ++tag) self.exchange(1 - self.rank, tag);
    self.poll_until([&] { return self.link->idle(); });
    self.meet(2, 1, true);
  });
}

}  // namespace

int main() {
  control_messages_come_in_order_and_once();
  transfers_find_their_receives();
  other_sizes_than_expected_are_errors();
  the_others_go_on_when_one_is_killed();
  a_transfer_that_is_dropped_does_no_harm();
  strangers_are_not_heard();
  an_idle_link_holds_nothing_back();
  what_was_posted_comes_before_the_end();
  a_world_hears_nothing_of_an_earlier_one();
  who_ends_waits_until_all_is_heard();
  a_forked_child_disturbs_nothing();
  // With network cards that fetch memory, UCX asks before it sends large data, so small messages overtake the data.
  setenv("UCX_RNDV_THRESH", "64k", 1);
  control_messages_come_in_order_and_once();
  transfers_find_their_receives();
  other_sizes_than_expected_are_errors();
  the_others_go_on_when_one_is_killed();
  CHECK(ucx::describe().starts_with("UCX 1."));  // last, so that no UCX is loaded where processes are forked
  return test::report();
}
