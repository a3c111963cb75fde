// Shared memory between real processes, mailboxes with messages larger than their rings, and the sim transport.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <numeric>

#include "check.h"
#include "transport/shm/shm.h"
#include "transport/sim/sim.h"

using namespace sordino;

namespace {

Bytes pattern(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 131 + static_cast<std::size_t>(seed));
  return bytes;
}

// Parent and child exchange messages of many sizes through mailboxes that each has made and the other has mapped.
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
    } catch (const Error&) {  // each has been given once, and the next ones come
    }
  }
  if (child == 0) _exit(right ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(right);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
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

// What a peer says of its memory is checked against what it has: a mapping beyond the end of a file is a SIGBUS later.
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
  further.bytes = 1 << 20;  // of a segment that is mapped already
  further.offset = 1 << 19;
  CHECK_THROWS(TransportError, peer.map(3, further));
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

void sim_gives_each_message_once() {
  auto world = sim::Network({0, 0}).transports();
  for (int i = 0; i < 5; ++i) world[0]->post(1, pattern(3, i));
  std::vector<Bytes> given;
  const auto refuse_some = [&](int, std::span<const std::byte> message) {
    given.emplace_back(message.begin(), message.end());
    if (given.size() % 2 == 0) throw Error("whoever takes it does not like it");
  };
  for (const std::size_t before : {0, 2}) {
    CHECK(given.size() == before);
    CHECK_THROWS(Error, world[1]->poll(refuse_some));
  }
  CHECK(world[1]->poll(refuse_some) && !world[1]->poll(refuse_some));
  CHECK(given.size() == 5);
  for (int i = 0; i < 5; ++i) CHECK(given[static_cast<std::size_t>(i)] == pattern(3, i));
}

}  // namespace

int main() {
  messages_cross_processes();
  segments_know_what_lies_in_them();
  memory_that_is_not_there_is_not_mapped();
  sim_delivers_in_order();
  sim_gives_each_message_once();
  return sordino::test::report();
}
