// Shared memory between real processes, mailboxes with messages larger than their rings, pipes, and the sim transport.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <optional>

#include "base/cores.h"
#include "base/limits.h"
#include "check.h"
#include "transport/process/process_watch.h"
#include "transport/ring.h"
#include "transport/shm/mailboxes.h"
#include "transport/shm/memory.h"
#include "transport/shm/pipes.h"
#include "transport/sim/sim.h"

using namespace sordino;

namespace {

Bytes pattern(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 131 + static_cast<std::size_t>(seed));
  return bytes;
}

// Parent and child exchange messages of many sizes through mailboxes; each makes its own and maps the other's.
void messages_cross_processes() {
  constexpr int kMessages = 200;
  const auto size_of_message = [](int i) { return static_cast<std::size_t>(i % 7 == 0 ? 150'000 : i * 37 % 3000); };
  int to_child[2], to_parent[2];
  CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
  const pid_t parent = getpid();
  const pid_t child = fork();
  const int self = child == 0 ? 1 : 0;
  shm::ShmMemory memory;
  memory.introduce(1 - self, child == 0 ? parent : child);
  const auto box = memory.allocate(shm::Mailboxes::bytes_for(2));
  Location mine = memory.locate(box->data, box->bytes), theirs;
  const int out = self == 0 ? to_child[1] : to_parent[1], in = self == 0 ? to_parent[0] : to_child[0];
  const bool sent = write(out, &mine, sizeof(mine)) == sizeof(mine);
  const bool got = read(in, &theirs, sizeof(theirs)) == sizeof(theirs);
  std::byte* peer_box = memory.map(1 - self, theirs);
  std::vector<std::byte*> boxes{self == 0 ? box->data : peer_box, self == 0 ? peer_box : box->data};
  shm::Mailboxes mailboxes({0, 1}, self, boxes);
  for (int i = 0; i < kMessages; ++i) mailboxes.post(1 - self, pattern(size_of_message(i), i + self));
  int arrived = 0;
  bool right = sent && got;
  const auto check_one = [&](int from, std::span<const std::byte> message) {
    const Bytes expected = pattern(size_of_message(arrived), arrived + 1 - self);
    right = right && from == 1 - self && message.size() == expected.size() &&
            std::memcmp(message.data(), expected.data(), expected.size()) == 0;
    if (arrived++ % 5 == 0) throw Error("whoever takes it does not like it");
  };
  while (arrived < kMessages || !mailboxes.idle()) {
    const std::uint32_t ticket = mailboxes.bell(self).ticket();
    try {
      if (!mailboxes.poll(check_one)) mailboxes.bell(self).sleep(ticket, std::chrono::milliseconds(5));
    } catch (const Error&) {  // each was delivered once; the next ones follow
    }
  }
  if (child == 0) _exit(right ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(right);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void a_ring_goes_round_and_is_not_overrun() {
  constexpr std::size_t kCapacity = 100;
  Bytes memory(Ring::bytes_for(kCapacity) + 64);
  const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
  std::byte* place = memory.data() + (64 - misaligned) % 64;
  Ring writer(place, kCapacity), reader(place, kCapacity);
  int put = 0, taken = 0;
  for (int turn = 0; turn < 50; ++turn) {
    const std::size_t room = writer.room();
    CHECK(room == kCapacity - static_cast<std::size_t>(put - taken));
    for (std::size_t i = 0; i < std::min<std::size_t>(room, 37); ++i) {
      const auto value = static_cast<unsigned char>(put++);
      writer.put(&value, 1);
    }
    writer.publish();
    const std::size_t ready = std::min<std::size_t>(reader.ready(), turn % 3 == 0 ? 61 : 20);
    Bytes got(ready);
    reader.take(got.data(), ready);
    reader.release();
    for (const std::byte one : got) CHECK(one == static_cast<std::byte>(taken++));
  }
  std::uint64_t absurd = 1000;
  std::memcpy(place, &absurd, sizeof(absurd));  // as a broken peer would leave it
  CHECK_THROWS(TransportError, reader.ready());
}

// Two ranks of one process with pipes between them, driven by hand.
struct Plumbing {
  shm::ShmMemory memory[2];
  std::vector<std::pair<int, Location>> told[2];
  shm::Pipes pipes[2] = {
      {memory[0], {0, 1}, [this](int to, const Location& at) { told[0].emplace_back(to, at); }, [](int) {}},
      {memory[1], {0, 1}, [this](int to, const Location& at) { told[1].emplace_back(to, at); }, [](int) {}}};
  Plumbing() {
    for (auto& one : memory) {
      one.introduce(0, getpid());
      one.introduce(1, getpid());
    }
  }
  void introduce() {
    for (int self : {0, 1}) {
      for (const auto& [to, at] : std::exchange(told[self], {})) pipes[to].open(self, at);
    }
  }
  // Polls until nothing moves.
  void settle() {
    introduce();
    for (bool moved = true; moved;) {
      moved = pipes[0].poll();
      moved |= pipes[1].poll();
    }
  }
};

void pipes_bring_each_message_to_who_waits_for_it() {
  Plumbing plumbing;
  std::vector<Bytes> data, got;
  for (const std::size_t size : {0u, 1u, 4096u, 300'000u, 5'000'000u, 17u}) {
    data.push_back(pattern(size, static_cast<int>(data.size())));
    got.emplace_back(size);
  }
  std::vector<std::unique_ptr<Transfer>> sends, receives;
  for (std::size_t i = 0; i < 3; ++i) receives.push_back(plumbing.pipes[1].receive(0, static_cast<Tag>(i), got[i]));
  for (std::size_t i = data.size(); i-- > 0;) sends.push_back(plumbing.pipes[0].send(1, static_cast<Tag>(i), data[i]));
  plumbing.introduce();
  for (const auto& one : sends) {
    plumbing.pipes[0].poll();
    CHECK(!one->test());  // nothing was received yet; a sender that left now would take its data along
  }
  for (int turn = 0; turn < 3; ++turn) {  // some of it arrives before the rest is asked for
    plumbing.pipes[0].poll();
    plumbing.pipes[1].poll();
  }
  for (std::size_t i = 3; i < data.size(); ++i)
    receives.push_back(plumbing.pipes[1].receive(0, static_cast<Tag>(i), got[i]));
  plumbing.settle();
  for (const auto& one : sends) CHECK(one->test());
  for (std::size_t i = 0; i < data.size(); ++i) CHECK(receives[i]->test() && got[i] == data[i], i);
}

void messages_of_one_tag_keep_their_order() {
  Plumbing plumbing;
  const Bytes first = pattern(600'000, 1), second = pattern(600'000, 2);
  Bytes a(first.size()), b(first.size());
  auto one = plumbing.pipes[0].send(1, 7, first), two = plumbing.pipes[0].send(1, 7, second);
  plumbing.settle();
  auto into_a = plumbing.pipes[1].receive(0, 7, a), into_b = plumbing.pipes[1].receive(0, 7, b);
  plumbing.settle();
  CHECK(one->test() && two->test() && into_a->test() && into_b->test());
  CHECK(a == first && b == second);
}

void what_is_given_up_is_not_received() {
  Plumbing plumbing;
  const Bytes data = pattern(3'000'000, 5), after = pattern(1000, 6);
  Bytes got(data.size()), got_after(after.size());
  auto sending = plumbing.pipes[0].send(1, 3, data);
  auto receiving = plumbing.pipes[1].receive(0, 3, got);
  plumbing.introduce();
  plumbing.pipes[1].poll();  // the first chunks are there
  auto next = plumbing.pipes[0].send(1, 4, after);
  sending.reset();
  plumbing.settle();
  auto receiving_next = plumbing.pipes[1].receive(0, 4, got_after);
  CHECK(!receiving->test());
  CHECK(next->test() && receiving_next->test() && got_after == after);
  // The other direction: a receiver that gives up does not block other transfers, and its memory is not written.
  auto again = plumbing.pipes[0].send(1, 5, data);
  Bytes untouched(data.size());
  auto abandoned = plumbing.pipes[1].receive(0, 5, untouched);
  abandoned.reset();
  auto last = plumbing.pipes[0].send(1, 6, after);
  plumbing.settle();
  auto receiving_last = plumbing.pipes[1].receive(0, 6, got_after);
  CHECK(again->test() && last->test() && receiving_last->test());
  CHECK(untouched == Bytes(data.size()));
}

// A receive is given up when a part of its message is there: the rest is not written.
void memory_of_a_receive_that_was_given_up_half_way_is_left_alone() {
  Plumbing plumbing;
  const Bytes data = pattern(3'000'000, 5), after = pattern(1000, 6);
  Bytes got(data.size()), got_after(after.size());
  auto sending = plumbing.pipes[0].send(1, 5, data);
  auto receiving = plumbing.pipes[1].receive(0, 5, got);
  plumbing.introduce();
  plumbing.pipes[1].poll();
  CHECK(got.front() == data.front() && got.back() != data.back() && !receiving->test());
  receiving.reset();
  std::fill(got.begin(), got.end(), std::byte{0});  // the memory is in other use by now
  auto next = plumbing.pipes[0].send(1, 6, after);
  auto receiving_next = plumbing.pipes[1].receive(0, 6, got_after);
  plumbing.settle();
  CHECK(sending->test() && next->test() && receiving_next->test() && got_after == after);
  CHECK(got == Bytes(data.size()));
}

// A receive that was given up before its message came takes nothing from the next receive, before or after the message.
void who_has_given_up_is_passed_over() {
  for (const bool early : {false, true}) {
    Plumbing plumbing;
    const Bytes data = pattern(600'000, 5);
    Bytes untouched(data.size()), got(data.size());
    plumbing.pipes[1].receive(0, 5, untouched).reset();
    std::unique_ptr<Transfer> next;
    if (early) next = plumbing.pipes[1].receive(0, 5, got);
    const auto sending = plumbing.pipes[0].send(1, 5, data);
    plumbing.settle();
    if (!early) next = plumbing.pipes[1].receive(0, 5, got);
    CHECK(sending->test() && next->test() && got == data, early);
    CHECK(untouched == Bytes(data.size()));
  }
}

void pipes_do_not_believe_what_they_are_told() {
  Plumbing plumbing;
  const Bytes data = pattern(10, 1);
  Bytes got(9);
  auto short_one = plumbing.pipes[1].receive(0, 1, got);
  auto sending = plumbing.pipes[0].send(1, 1, data);
  plumbing.settle();
  CHECK(sending->test());
  CHECK_THROWS(TransportError, short_one->test());
  auto early = plumbing.pipes[0].send(1, 2, data);
  plumbing.settle();
  auto late = plumbing.pipes[1].receive(0, 2, got);
  CHECK_THROWS(TransportError, late->test());
  const auto small = plumbing.memory[0].allocate(1000);
  CHECK_THROWS(TransportError, plumbing.pipes[1].open(1, plumbing.memory[0].locate(small->data, 1000)));
}

void segments_know_what_lies_in_them() {
  shm::ShmMemory memory;
  auto segment = memory.allocate(1000);
  CHECK(memory.locate(segment->data, 1000).segment != 0);
  CHECK(memory.locate(segment->data + 999, 1).offset == 999);
  CHECK(memory.locate(segment->data + 999, 2).segment == 0);
  int elsewhere = 0;
  CHECK(memory.locate(&elsewhere, 4).segment == 0);
  const auto id = memory.locate(segment->data, 1).segment;
  segment.reset();
  CHECK((memory.take_freed() == std::vector<std::uint64_t>{id}));
  CHECK(memory.take_freed().empty());
  const Location nowhere{1, 1, 0, 0};
  CHECK_THROWS(TransportError, memory.map(5, nowhere));
  CHECK_THROWS(TransportError, memory.allocate(std::size_t{1} << 60));
}

std::size_t memory_of(const Segment& segment, const Location& place) {
  struct stat file{};
  CHECK(fstat(static_cast<int>(place.key), &file) == 0 && static_cast<std::size_t>(file.st_size) == segment.bytes);
  return static_cast<std::size_t>(file.st_blocks) * 512;
}

// Neither the owner's mapping nor a peer's gives memory to the rest of a sparse segment.
void a_sparse_segment_has_memory_only_where_it_was_reserved() {
  constexpr std::size_t kBytes = std::size_t{1} << 20, kMost = std::size_t{64} << 10;
  shm::ShmMemory owner, peer;
  peer.introduce(3, getpid());
  const auto segment = owner.allocate_sparse(kBytes, 8192);
  const Location place = owner.locate(segment->data, kBytes);
  const std::byte* seen = peer.map(3, place);
  segment->data[8191] = std::byte{7};
  CHECK(seen[8191] == std::byte{7} && memory_of(*segment, place) == 8192);
  segment->reserve(100);
  CHECK(memory_of(*segment, place) == 8192);
  segment->reserve(10'000);
  const std::size_t some = memory_of(*segment, place);
  CHECK(some >= 10'000 && some <= 10'000 + kMost);
  segment->data[9999] = std::byte{8};
  CHECK(seen[9999] == std::byte{8} && memory_of(*segment, place) == some);
  segment->reserve(kBytes);
  segment->data[kBytes - 1] = std::byte{9};
  CHECK(seen[kBytes - 1] == std::byte{9} && memory_of(*segment, place) == kBytes);
}

// The lack of memory is an error where memory is reserved. Without that, the first write would be a SIGBUS.
void a_sparse_segment_that_cannot_have_its_memory_says_so() {
  shm::ShmMemory memory;
  const std::size_t more = 2 * Limits().available_memory().bytes;  // ThreadSanitizer maps no terabytes
  const auto segment = memory.allocate_sparse(more, 4096);
  std::string text;
  try {
    segment->reserve(more);
  } catch (const TransportError& error) {
    text = error.what();
  }
  CHECK(text.find("no room for") != std::string::npos && text.find(" are available in ") != std::string::npos, text);
  segment->data[4095] = std::byte{1};
}

// A peer's location is checked against its memory: a mapping beyond the end of a file would be a SIGBUS later.
void memory_that_is_not_there_is_not_mapped() {
  shm::ShmMemory owner, peer;
  peer.introduce(3, getpid());
  const auto segment = owner.allocate(1000);
  const Location place = owner.locate(segment->data, 1000);
  Location larger = place, beyond = place, further = place;
  larger.bytes = 1 << 20;
  beyond.offset = 1001;
  CHECK_THROWS(TransportError, peer.map(3, larger));
  CHECK_THROWS(TransportError, peer.map(3, beyond));
  CHECK(peer.map(3, place) != nullptr);
  further.bytes = 1 << 20;  // of a segment that is already mapped
  further.offset = 1 << 19;
  CHECK_THROWS(TransportError, peer.map(3, further));
}

// Prevents this process from opening files while it lives.
class NoMoreFiles {
 public:
  NoMoreFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit none = before_;
    none.rlim_cur = 3;  // the next descriptor must be below it
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoMoreFiles() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

// Returns the error text of a call that finds no free descriptor. The text is read when descriptors are free again,
// because UndefinedBehaviorSanitizer needs some for that.
template <class Call>
std::string text_without_files(Call&& call) {
  try {
    const NoMoreFiles limit;
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// A peer's memory is gone with its process, or because the peer has freed it. A limit of this process is another error.
void memory_that_is_gone_is_told_from_memory_that_cannot_be_mapped() {
  shm::ShmMemory owner, peer;
  peer.introduce(3, getpid());
  auto segment = owner.allocate(1000);
  const Location place = owner.locate(segment->data, 1000);
  for (const auto& text :
       {text_without_files([&] { peer.map(3, place); }), text_without_files([&] { owner.allocate(1); })}) {
    CHECK(text.find("Too many open files: this process may have 3 open at once") != std::string::npos, text);
    CHECK(text.find("ulimit -n") != std::string::npos, text);
  }
  bool gone = false;
  try {
    const NoMoreFiles limit;
    peer.map(3, place);
  } catch (const MemoryGone&) {
    gone = true;
  } catch (const TransportError&) {
  }
  CHECK(!gone);
  segment.reset();
  CHECK_THROWS(MemoryGone, peer.map(3, place));
  const auto another = owner.allocate(1000);  // it has the same descriptor
  CHECK(owner.locate(another->data, 1).key == place.key);
  CHECK_THROWS(MemoryGone, peer.map(3, place));
  CHECK(peer.map(3, owner.locate(another->data, 1)) != nullptr);
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  peer.introduce(4, child);
  CHECK_THROWS(MemoryGone, peer.map(4, owner.locate(another->data, 1)));
}

// A kernel that undoes the whole reservation when a signal comes, as happens every few milliseconds.
void signals_do_not_keep_memory_from_being_reserved() {
  constexpr off_t kMost = off_t{32} << 20;  // that it reserves before the next signal
  off_t reserved = 0;
  int calls = 0;
  const auto allocate = [&](int fd, off_t offset, off_t bytes) {
    CHECK(fd == 7 && offset == reserved);
    if (bytes > kMost || ++calls % 2 == 1) return EINTR;
    reserved += bytes;
    return 0;
  };
  CHECK(shm::reserve(7, 0, (std::size_t{1} << 30) + 5, allocate) == 0 && reserved == (off_t{1} << 30) + 5);
  CHECK(shm::reserve(7, 0, 10, [](int, off_t, off_t) { return ENOSPC; }) == ENOSPC);
}

// It is seen with a descriptor of the process and without one.
void the_end_of_a_process_is_seen() {
  for (const bool limited : {false, true}) {
    for (const bool collected : {false, true}) {
      const pid_t child = fork();
      if (child == 0) {
        pause();
        _exit(0);
      }
      std::optional<process::ProcessWatch> watch;
      {
        std::optional<NoMoreFiles> limit;
        if (limited) limit.emplace();
        watch.emplace(child);
        CHECK((watch->descriptor() >= 0) == !limited);
        CHECK(!watch->ended());
      }
      CHECK(!watch->ended());
      process::ProcessWatch moved = std::move(*watch);
      watch.reset();
      kill(child, SIGKILL);
      siginfo_t ended{};
      waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT);
      if (collected) waitpid(child, nullptr, 0);
      CHECK(moved.ended(), "limited", limited, "collected", collected);
      if (!collected) waitpid(child, nullptr, 0);
      CHECK(process::ProcessWatch(child).ended());
    }
  }
}

// The end of each process is reported once, whether or not it has a descriptor.
void the_ends_of_several_processes_are_seen() {
  std::vector<pid_t> children;
  process::ProcessWatches watches;
  for (int key = 0; key < 4; ++key) {
    const pid_t child = fork();
    if (child == 0) {
      pause();
      _exit(0);
    }
    children.push_back(child);
    std::optional<NoMoreFiles> limit;
    if (key % 2 == 1) limit.emplace();
    watches.add(10 + key, process::ProcessWatch(child));
  }
  CHECK(watches.take_ended().empty());
  const auto end = [&](int key) {
    kill(children[static_cast<std::size_t>(key)], SIGKILL);
    waitpid(children[static_cast<std::size_t>(key)], nullptr, 0);
  };
  for (const int key : {2, 1}) {
    end(key);
    CHECK(watches.take_ended() == std::vector<int>{10 + key}, "key", key);
    CHECK(watches.take_ended().empty());
  }
  end(0);
  end(3);
  CHECK(watches.take_ended() == std::vector<int>({10, 13}));
}

void sim_delivers_in_order() {
  auto world = sim::Network({0, 0}).transports();
  const Bytes first = pattern(10, 1), second = pattern(10, 2);
  auto one = world[0]->send(1, 7, first), two = world[0]->send(1, 7, second);
  Bytes a(10), b(10);
  auto into_a = world[1]->receive(0, 7, a), into_b = world[1]->receive(0, 7, b);
  CHECK(!one->test());
  CHECK(into_a->test() && into_b->test() && one->test() && two->test());
  CHECK(a == first && b == second);
  auto short_one = world[0]->send(1, 8, std::span(first).first(3));
  auto receiving = world[1]->receive(0, 8, a);
  CHECK_THROWS(TransportError, receiving->test());
  CHECK_THROWS(UsageError, sim::Network({}));
  world[0].reset();
  CHECK(world[1]->take_losses().size() == 1);
}

// Five messages have been written, and no more come. Messages after a refused one are still delivered.
template <class Poll>
void each_is_given_once(Poll poll) {
  std::vector<Bytes> given;
  const auto refuse_some = [&](int, std::span<const std::byte> message) {
    given.emplace_back(message.begin(), message.end());
    if (given.size() % 2 == 0) throw Error("whoever takes it does not like it");
  };
  for (const std::size_t before : {0, 2}) {
    CHECK(given.size() == before);
    CHECK_THROWS(Error, poll(refuse_some));
  }
  CHECK(poll(refuse_some) && !poll(refuse_some));
  CHECK((given == std::vector<Bytes>{pattern(3, 0), pattern(3, 1), pattern(3, 2), pattern(3, 3), pattern(3, 4)}));
}

void sim_gives_each_message_once() {
  auto world = sim::Network({0, 0}).transports();
  for (int i = 0; i < 5; ++i) world[0]->post(1, pattern(3, i));
  each_is_given_once([&](const Sink& sink) { return world[1]->poll(sink); });
}

void mailboxes_give_each_message_once() {
  shm::ShmMemory memory;
  const auto one = memory.allocate(shm::Mailboxes::bytes_for(2)), two = memory.allocate(shm::Mailboxes::bytes_for(2));
  shm::Mailboxes writer({0, 1}, 0, {one->data, two->data}), reader({0, 1}, 1, {one->data, two->data});
  for (int i = 0; i < 5; ++i) writer.post(1, pattern(3, i));
  each_is_given_once([&](const Sink& sink) { return reader.poll(sink); });
}

void private_memory_of_a_peer_is_copied() {
  constexpr std::size_t kBytes = 300'000;
  const shm::PrivateMemory::Mark mark = shm::PrivateMemory::mark();  // the child inherits it
  int ready[2];
  CHECK(pipe(ready) == 0);
  const pid_t child = fork();
  if (child == 0) {
    const Bytes data = pattern(kBytes, 5);
    const std::byte* place = data.data();
    const bool sent = write(ready[1], &place, sizeof(place)) == sizeof(place);
    while (sent) pause();
    _exit(1);
  }
  std::uint64_t address = 0;
  CHECK(read(ready[0], &address, sizeof(address)) == sizeof(address));
  const auto at = [address](std::size_t begin) {
    return Location{.segment = Location::kPrivate, .bytes = kBytes, .offset = begin, .key = address};
  };
  shm::PrivateMemory reader;
  reader.introduce(1, child, mark);
  shm::ShmMemory memory;
  Bytes got(1000);
  CHECK(memory.offer(got.data(), got.size()).segment == 0);
  CHECK_THROWS(TransportError, memory.copy(1, at(0), got));  // the node has not agreed to it
  const std::string why = reader.why_unreadable(1);
  CHECK(why.empty() || why.starts_with("cannot read"), why);  // where the kernel refuses, nothing else can be tested
  if (why.empty()) {
    memory.read_private_with(reader);
    CHECK(memory.offer(got.data(), got.size()).segment == Location::kPrivate);
    memory.copy(1, at(99'000), got);
    const Bytes whole = pattern(kBytes, 5);
    CHECK(std::equal(got.begin(), got.end(), whole.begin() + 99'000));
    CHECK_THROWS(TransportError, memory.copy(1, at(299'001), got));
    CHECK_THROWS(TransportError, memory.copy(2, at(0), got));
    CHECK_THROWS(TransportError, memory.map(1, at(0)));
    CHECK(!memory.offers_private(reinterpret_cast<const void*>(4096), 100, NodeMemory::Sure::kYes));
    // Nothing is mapped there, or less than a reader wants. The error must not say that the rank is lost.
    const auto is_out_of_reach = [&reader](int rank, std::uint64_t place) {
      Bytes pages(8192);
      try {
        reader.read(rank, place, pages);
      } catch (const MemoryGone&) {
        return false;
      } catch (const NotCopied&) {
        return true;
      }
      return false;
    };
    CHECK(is_out_of_reach(1, 4096));
    void* half = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(half != MAP_FAILED && munmap(static_cast<std::byte*>(half) + 4096, 4096) == 0);
    reader.introduce(2, getpid(), mark);
    CHECK(is_out_of_reach(2, reinterpret_cast<std::uint64_t>(half)));
    munmap(half, 4096);
    reader.introduce(1, child, {mark.address, mark.value + 1});  // as if the process were another one
    CHECK_THROWS(MemoryGone, reader.read(1, address, got));
    CHECK_THROWS(MemoryGone, reader.read(1, 4096, got));
    CHECK(!reader.why_unreadable(1).empty());
  } else {
    std::fprintf(stderr, "not tested, since %s\n", why.c_str());
  }
  kill(child, SIGKILL);
  CHECK(waitpid(child, nullptr, 0) == child);
  CHECK_THROWS(MemoryGone, reader.read(1, address, got));
  close(ready[0]);
  close(ready[1]);
}

void the_cores_of_a_process_are_those_that_it_may_run_on() {
  cpu_set_t before;
  CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
  CHECK(Cores::of_this_process().count() == CPU_COUNT(&before));
  cpu_set_t last;
  CPU_ZERO(&last);
  int core = CPU_SETSIZE - 1;
  while (!CPU_ISSET(core, &before)) --core;
  CPU_SET(core, &last);
  CHECK(sched_setaffinity(0, sizeof(last), &last) == 0);
  const Cores bound = Cores::of_this_process();
  CHECK(bound.count() == 1 && bound.mask.at(static_cast<std::size_t>(core) / 64) == std::uint64_t{1} << core % 64);
  CHECK(sched_setaffinity(0, sizeof(before), &before) == 0);
}

// Ranks in different containers of one machine share its cores. Ranks that are bound to different cores share none, nor
// do ranks of different machines.
void ranks_share_the_cores_of_a_machine() {
  const auto share = [](const std::vector<Cores>& cores, std::size_t me) { return ranks_per_core(cores, me); };
  const Cores first{"a", {0b01}}, second{"a", {0b10}}, both{"a", {0b11}}, far{"a", {0, 0b11}}, other{"b", {0b11}};
  CHECK(share({both}, 0) == 0.5);
  CHECK(share({both, both}, 1) == 1);
  CHECK(share({both, both, both, both}, 0) == 2);
  CHECK(share({both, other, both, other}, 1) == 1);
  CHECK(share({first, second}, 0) == 1 && share({first, second}, 1) == 1);
  CHECK(share({first, first, second}, 0) == 2 && share({first, first, second}, 2) == 1);
  CHECK(share({both, first}, 0) == 1 && share({both, first}, 1) == 2);
  CHECK(share({both, far, far}, 0) == 0.5 && share({both, far, far}, 2) == 1);
  CHECK(share({{"a", {}}, {"a", {}}}, 0) == 1);  // unknown cores
}

}  // namespace

int main() {
  messages_cross_processes();
  a_ring_goes_round_and_is_not_overrun();
  pipes_bring_each_message_to_who_waits_for_it();
  messages_of_one_tag_keep_their_order();
  what_is_given_up_is_not_received();
  memory_of_a_receive_that_was_given_up_half_way_is_left_alone();
  who_has_given_up_is_passed_over();
  pipes_do_not_believe_what_they_are_told();
  segments_know_what_lies_in_them();
  a_sparse_segment_has_memory_only_where_it_was_reserved();
  a_sparse_segment_that_cannot_have_its_memory_says_so();
  memory_that_is_not_there_is_not_mapped();
  memory_that_is_gone_is_told_from_memory_that_cannot_be_mapped();
  signals_do_not_keep_memory_from_being_reserved();
  the_end_of_a_process_is_seen();
  the_ends_of_several_processes_are_seen();
  sim_delivers_in_order();
  sim_gives_each_message_once();
  mailboxes_give_each_message_once();
  private_memory_of_a_peer_is_copied();
  the_cores_of_a_process_are_those_that_it_may_run_on();
  ranks_share_the_cores_of_a_machine();
  return sordino::test::report();
}
