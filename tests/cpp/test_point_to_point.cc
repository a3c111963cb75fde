// Messages between two ranks, on engines without threads and on worlds of threads: order, buffering and its limit, any
// source, mismatches, losses, deadlines, and random programs against a model.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "engine/world.h"
#include "engines.h"
#include "transport/ring.h"
#include "wrapped.h"

using namespace sordino;
using sordino::test::Engine;
using sordino::test::Engines;
using sordino::test::error_of;

namespace {

constexpr std::size_t kWhole = PointToPoint::kWholeBytes;
constexpr int kAny = Posting::kAnySource;

std::vector<std::byte> bytes_of(std::size_t count, int seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(seed) * 31);
  return bytes;
}

// One call, with its memory.
struct Call {
  std::vector<std::byte> data;
  std::shared_ptr<Posting> posting = std::make_shared<Posting>();
  std::shared_ptr<Handle> handle;

  bool done() const { return handle->done(); }
  bool succeeded() const { return handle->done() && !handle->error; }
};

Call make(bool sends, int peer, std::int64_t tag, std::vector<std::byte> data, DType dtype = DType::kUInt8) {
  Call call;
  call.data = std::move(data);
  call.posting->sends = sends;
  call.posting->peer = peer;
  call.posting->tag = tag;
  call.posting->dtype = dtype;
  call.posting->data = call.data.data();
  call.posting->bytes = call.data.size();
  return call;
}

Call started(Engine& engine, Call call) {
  if (call.posting->peer == kAny) {
    for (int rank = 0; rank < engine.transport->size(); ++rank) {
      if (rank != engine.transport->rank()) call.posting->sources.push_back(rank);
    }
  }
  call.handle = engine.messages.submit(call.posting);
  engine.messages.begin_submitted();
  return call;
}

Call send(Engine& engine, int to, std::int64_t tag, std::vector<std::byte> data, DType dtype = DType::kUInt8) {
  return started(engine, make(true, to, tag, std::move(data), dtype));
}

Call receive(Engine& engine, int from, std::int64_t tag, std::size_t bytes, DType dtype = DType::kUInt8) {
  return started(engine, make(false, from, tag, std::vector<std::byte>(bytes), dtype));
}

const std::vector<std::vector<int>> kPlaces{{0, 0}, {0, 1}};  // node peers, and ranks of two nodes
const std::size_t kSizes[] = {0, 1, 100, kWhole, kWhole + 8, 5 * kWhole};

void messages_keep_their_order() {
  for (const auto& nodes : kPlaces) {
    for (const bool early : {true, false}) {  // whether the messages come before their receives
      Engines ranks(nodes);
      std::vector<Call> sends, receives;
      const auto receive_all = [&] {
        for (const std::size_t size : kSizes) receives.push_back(receive(ranks[1], 0, 3, size));
      };
      if (!early) receive_all();
      for (const std::size_t size : kSizes)
        sends.push_back(send(ranks[0], 1, 3, bytes_of(size, static_cast<int>(size % 97))));
      ranks.settle();
      if (early) {
        for (std::size_t i = 0; i < sends.size(); ++i) CHECK(sends[i].done() == (kSizes[i] <= kWhole), kSizes[i]);
        CHECK(ranks[0].messages.busy());
        receive_all();
        ranks.settle();
      }
      for (std::size_t i = 0; i < sends.size(); ++i) {
        CHECK(sends[i].succeeded() && receives[i].succeeded(), kSizes[i]);
        CHECK(receives[i].data == sends[i].data, kSizes[i]);
        CHECK(receives[i].handle->source == 0);
      }
      CHECK(!ranks[0].messages.busy() && !ranks[1].messages.busy());
    }
  }
}

void tags_and_sets_are_separate() {
  for (const auto& nodes : kPlaces) {
    Engines ranks(nodes);
    std::vector<Call> sends;
    for (int tag = 0; tag < 3; ++tag) sends.push_back(send(ranks[0], 1, tag, bytes_of(50, tag)));
    Call other = make(true, 1, 1, bytes_of(50, 9));
    other.posting->set = 4;
    sends.push_back(started(ranks[0], std::move(other)));
    ranks.settle();
    for (int tag = 2; tag >= 0; --tag) CHECK(receive(ranks[1], 0, tag, 50).data == bytes_of(50, tag));
    Call of_set = make(false, 0, 1, std::vector<std::byte>(50));
    of_set.posting->set = 4;
    CHECK(started(ranks[1], std::move(of_set)).data == bytes_of(50, 9));
    Call waiting_of_set = make(false, 0, 6, std::vector<std::byte>(50)), to_set = make(true, 1, 6, bytes_of(50, 5));
    waiting_of_set.posting->set = to_set.posting->set = 4;
    Call waiting = receive(ranks[1], 0, 6, 50);
    waiting_of_set = started(ranks[1], std::move(waiting_of_set));
    to_set = started(ranks[0], std::move(to_set));
    ranks.settle();
    CHECK(!waiting.done() && waiting_of_set.succeeded() && waiting_of_set.data == to_set.data);
    CHECK(!receive(ranks[1], 0, 1, 50).done());
    ranks[1].failures.fail(std::make_exception_ptr(Error("over")), false);
  }
}

// Beyond the limit, small messages are announced, and wait at their sender. They keep their order.
void buffering_has_a_limit() {
  for (const auto& nodes : kPlaces) {
    Engines ranks(nodes);
    constexpr int kCount = 40;
    const int most = static_cast<int>(PointToPoint::kBufferedBytes / (kWhole + PointToPoint::kOverhead));
    for (int round = 0; round < 8; ++round) {  // the memory of a round can be used again
      std::vector<Call> sends, receives;
      for (int i = 0; i < kCount; ++i) {
        sends.push_back(send(ranks[0], 1, 0, bytes_of(kWhole, i)));
        ranks.settle();
      }
      const auto over = std::count_if(sends.begin(), sends.end(), [](const Call& one) { return one.done(); });
      CHECK(over <= most && over >= most - (round == 0 ? 0 : 2), over, most);  // the last few may not be reported yet
      Call beside = send(ranks[0], 1, 5, bytes_of(10, 1));
      ranks.settle();
      Call taken = receive(ranks[1], 0, 5, 10);  // a message behind them is not held up
      ranks.settle();
      CHECK(taken.succeeded() && beside.succeeded() && taken.data == beside.data);
      for (int i = 0; i < kCount; ++i) receives.push_back(receive(ranks[1], 0, 0, kWhole));
      ranks.settle();
      for (int i = 0; i < kCount; ++i) {
        const auto at = static_cast<std::size_t>(i);
        CHECK(sends[at].succeeded() && receives[at].succeeded() && receives[at].data == sends[at].data, i);
      }
    }
  }
}

// While the receiver does not poll, the fast box fills up, and further sends wait in order.
void a_full_box_delays_sends() {
  Engines ranks({0, 0});
  std::vector<Call> sends, receives;
  for (int i = 0; i < 12; ++i) sends.push_back(send(ranks[0], 1, 0, bytes_of(kWhole, i)));
  for (int turn = 0; turn < 3; ++turn) ranks[0].poll();
  const auto over = std::count_if(sends.begin(), sends.end(), [](const Call& one) { return one.done(); });
  CHECK(over == static_cast<int>(FastBox::kCapacity / (kWhole + sizeof(Envelope))), over);
  for (int i = 0; i < 12; ++i) receives.push_back(receive(ranks[1], 0, 0, kWhole));
  ranks.settle();
  for (std::size_t i = 0; i < 12; ++i)
    CHECK(sends[i].succeeded() && receives[i].succeeded() && receives[i].data == sends[i].data, i);
}

void any_source_takes_the_first() {
  for (const std::vector<int>& nodes : {std::vector{0, 0, 0}, std::vector{0, 1, 2}}) {
    Engines ranks(nodes);
    Call late = send(ranks[2], 0, 1, bytes_of(20, 2));
    ranks.settle();
    Call later = send(ranks[1], 0, 1, bytes_of(20, 1));
    ranks.settle();
    for (const int source : {2, 1}) {
      const Call got = receive(ranks[0], kAny, 1, 20);
      CHECK(got.succeeded() && got.handle->source == source && got.data == bytes_of(20, source));
    }
    Call waiting = receive(ranks[0], kAny, 1, 20), named = receive(ranks[0], 1, 1, 20);
    Call large = send(ranks[1], 0, 1, bytes_of(20, 5)), second = send(ranks[1], 0, 1, bytes_of(20, 6));
    ranks.settle();
    CHECK(waiting.data == bytes_of(20, 5) && waiting.handle->source == 1 && named.data == bytes_of(20, 6));
  }
}

void a_rank_sends_to_itself() {
  Engines ranks({0, 0});
  for (const bool early : {true, false}) {
    for (const std::size_t size : kSizes) {
      Call first = early ? send(ranks[0], 0, 2, bytes_of(size, 3)) : receive(ranks[0], 0, 2, size);
      CHECK(first.done() == (early && size <= kWhole), size);
      Call second = early ? receive(ranks[0], 0, 2, size) : send(ranks[0], 0, 2, bytes_of(size, 3));
      CHECK(first.succeeded() && second.succeeded() && first.data == second.data, size);
      CHECK((early ? second : first).handle->source == 0);
    }
  }
  std::vector<Call> sends;
  for (int i = 0; i < 20; ++i) sends.push_back(send(ranks[0], 0, 2, bytes_of(kWhole, i)));
  for (int i = 0; i < 20; ++i) CHECK(receive(ranks[0], 0, 2, kWhole).data == bytes_of(kWhole, i), i);
  Call wrong = send(ranks[0], 0, 2, bytes_of(2 * kWhole, 1));
  const Call refusing = receive(ranks[0], 0, 2, 8);
  CHECK(!error_of<OperationMismatch>(*wrong.handle).empty() && !error_of<OperationMismatch>(*refusing.handle).empty());
}

void both_ranks_learn_of_a_mismatch() {
  for (const auto& nodes : kPlaces) {
    for (const bool early : {true, false}) {
      for (const std::size_t size : {std::size_t{64}, 2 * kWhole}) {
        Engines ranks(nodes);
        std::vector<Call> receives;
        const auto receive_all = [&] {
          receives.push_back(receive(ranks[1], 0, 0, size, DType::kInt32));
          receives.push_back(receive(ranks[1], 0, 0, size - 8));
          receives.push_back(receive(ranks[1], 0, 0, size));
        };
        if (!early) receive_all();
        std::vector<Call> sends;
        sends.push_back(send(ranks[0], 1, 0, bytes_of(size, 1), DType::kFloat32));
        sends.push_back(send(ranks[0], 1, 0, bytes_of(size, 2)));
        sends.push_back(send(ranks[0], 1, 0, bytes_of(size, 3)));
        ranks.settle();
        if (early) receive_all();
        ranks.settle();
        for (std::size_t i = 0; i < 2; ++i) {
          const std::string text = error_of<OperationMismatch>(*receives[i].handle);
          CHECK(text.find("recv from rank 0 with tag 0 on rank 1 expects") == 0, text);
          CHECK(text.find(i == 0 ? "elements of float32" : std::to_string(size) + " elements") != std::string::npos,
                text);
          if (size > kWhole) CHECK(error_of<OperationMismatch>(*sends[i].handle) == text);
        }
        CHECK(sends[2].succeeded() && receives[2].succeeded() && receives[2].data == sends[2].data);
        Call later = send(ranks[0], 1, 0, bytes_of(8, 4));
        CHECK(error_of<OperationMismatch>(*later.handle).empty() == (size > kWhole));
        Call latest = send(ranks[0], 1, 0, bytes_of(8, 5));
        ranks.settle();
        CHECK(latest.succeeded());
        CHECK(receive(ranks[1], 0, 0, 8).data == bytes_of(8, size > kWhole ? 4 : 5));
      }
    }
  }
}

// After a refusal, the next receive from that peer reports it, too, and does not take a message.
void a_receive_reports_a_refusal() {
  Engines ranks({0, 1});
  Call refused = send(ranks[0], 1, 0, bytes_of(4, 1)), back = send(ranks[1], 0, 0, bytes_of(4, 2));
  Call wrong = receive(ranks[1], 0, 0, 5);
  ranks.settle();
  CHECK(refused.succeeded());
  CHECK(!error_of<OperationMismatch>(*receive(ranks[0], 1, 0, 4).handle).empty());
  CHECK(receive(ranks[0], 1, 0, 4).data == bytes_of(4, 2));
}

// In memory that the node shares, a large message is copied once, and no transfer moves it.
void shared_tensors_are_read_in_place() {
  Engines ranks({0, 0});
  const std::size_t size = 3 * kWhole;
  const auto segment = ranks[0].transport->node_memory().allocate(2 * size);
  const auto values = bytes_of(size, 4);
  std::memcpy(segment->data + 64, values.data(), size);
  Call shared = make(true, 1, 0, {});
  shared.posting->data = segment->data + 64;
  shared.posting->bytes = size;
  shared = started(ranks[0], std::move(shared));
  Call got = receive(ranks[1], 0, 0, size);
  ranks[1].poll();  // alone: the sender does nothing
  CHECK(got.succeeded() && got.data == values && !shared.done());
  ranks[0].poll();
  CHECK(shared.succeeded());
}

// Once the sender has failed, its caller may change the data that it announced.
void shared_tensors_of_a_sender_that_has_failed_are_not_taken() {
  Engines ranks({0, 0});
  const std::size_t size = 3 * kWhole;
  const auto segment = ranks[0].transport->node_memory().allocate(size);
  Call shared = make(true, 1, 0, {});
  shared.posting->data = segment->data;
  shared.posting->bytes = size;
  shared = started(ranks[0], std::move(shared));
  ranks[1].poll();
  ranks[0].messages.end(std::make_exception_ptr(Error("the world has failed")));
  CHECK(shared.done() && !shared.succeeded());
  Call got = receive(ranks[1], 0, 0, size);
  ranks[1].poll();
  CHECK(!got.done());
  ranks[1].messages.end(std::make_exception_ptr(Error("rank 0 has failed")));
  CHECK(got.done() && !got.succeeded());
}

void a_rank_that_leaves() {
  for (const auto& nodes : kPlaces) {
    Engines ranks(nodes);
    Call small = send(ranks[0], 1, 0, bytes_of(30, 1)), large = send(ranks[0], 1, 1, bytes_of(2 * kWhole, 1));
    Call unsent = receive(ranks[1], 0, 2, 4), any = receive(ranks[1], kAny, 3, 4),
         to = send(ranks[1], 0, 0, bytes_of(2 * kWhole, 1));
    Call own = receive(ranks[1], 1, 3, 4);
    ranks[0].common.peers.post_to_all(goodbye("a reason"));
    ranks[1].poll();
    ranks[1].poll();
    for (const Call* one : {&unsent, &any, &to}) {
      const std::string text = error_of<PeerLost>(*one->handle);
      CHECK(text.find("rank 0, which has shut down because of a reason") != std::string::npos, text);
    }
    CHECK(!own.done());
    CHECK(receive(ranks[1], 0, 0, 30).data == small.data);  // was sent before
    for (const int tag : {1, 5}) CHECK(!error_of<PeerLost>(*receive(ranks[1], 0, tag, 2 * kWhole).handle).empty(), tag);
    CHECK(!error_of<PeerLost>(*receive(ranks[1], kAny, 5, 4).handle).empty());
    CHECK(!error_of<PeerLost>(*send(ranks[1], 0, 0, bytes_of(4, 1)).handle).empty());
    Call alone = send(ranks[1], 1, 3, bytes_of(4, 8));
    CHECK(own.succeeded() && own.data == alone.data);
    ranks[0].failures.fail(std::make_exception_ptr(Error("shut down")), false);
    CHECK(error_of<Error>(*large.handle) == "shut down");
  }
}

// Rank 2 leaves because it lost rank 1: calls that need rank 2 name rank 1. A rank never names itself.
void a_rank_that_leaves_because_of_another() {
  for (const auto& [lost, named] :
       std::vector<std::pair<std::vector<int>, std::vector<int>>>{{{}, {2}}, {{1}, {1}}, {{0}, {2}}, {{0, 1}, {1}}}) {
    Engines ranks({0, 0, 1});
    Call got = receive(ranks[0], 2, 0, 4);
    ranks[2].common.peers.post_to_all(goodbye("a reason", lost));
    ranks[0].poll();
    ranks[0].poll();
    CHECK(got.done() && got.handle->error);
    try {
      std::rethrow_exception(got.handle->error);
    } catch (const PeerLost& error) {
      CHECK(error.ranks == named && std::string(error.what()).find("needs rank 2") != std::string::npos, error.what());
    }
  }
}

// A transfer with a rank that has left may still bring bytes that the rank sent before. After a second it ends.
void a_transfer_from_a_rank_that_leaves() {
  for (const auto& nodes : kPlaces) {
    Engines ranks(nodes);
    Call large = send(ranks[0], 1, 1, bytes_of(20 * kWhole, 1));
    Call got = receive(ranks[1], 0, 1, 20 * kWhole);
    for (int turn = 0; turn < 3 && !ranks[1].transport->poll(ranks[1].sink); ++turn) ranks[0].poll();
    ranks[1].messages.advance();  // asks, and the sender does not answer
    CHECK(!got.done());
    ranks[1].failures.note_left(0, true, "has shut down");
    ranks[1].failures.watch(ranks[1].in(1));
    ranks[1].failures.watch(ranks[1].in(1.9));
    CHECK(!got.done());
    ranks[1].failures.watch(ranks[1].in(2.1));
    CHECK(!error_of<PeerLost>(*got.handle).empty() && got.handle->given_up);
  }
}

// A sender dies while it writes a message to its fast box: the first part of the message is there.
void a_rank_dies_within_a_message() {
  for (const bool early : {true, false}) {
    Engines ranks({0, 0});
    NodeMemory& memory = ranks[0].transport->node_memory();
    const auto segment = memory.allocate(FastBox::bytes());
    FastBox box(segment->data);
    ranks[0].transport->post(1, Writer()
                                    .put(Message::kMessage)
                                    .put(std::uint8_t{1})
                                    .put(memory.locate(segment->data, FastBox::bytes()))
                                    .take());
    ranks[1].poll();
    Call got;
    if (!early) got = receive(ranks[1], 0, 0, 1000);
    const Envelope envelope{1, 0, 1000, 0, DType::kUInt8, Envelope::Form::kWhole, 0};
    const auto half = bytes_of(500, 0);
    box.ring().put(&envelope, sizeof(envelope));
    box.ring().put(half.data(), half.size());
    box.ring().publish();
    ranks[1].poll();
    if (early) got = receive(ranks[1], 0, 0, 1000);
    ranks[1].poll();
    CHECK(!got.done());
    ranks[1].failures.note_left(0, true, "has shut down");
    CHECK(!error_of<PeerLost>(*got.handle).empty());
    CHECK(!error_of<PeerLost>(*receive(ranks[1], 0, 0, 1000).handle).empty());
  }
}

void deadlines() {
  Config config = Config::from_environment();
  config.stall_warn_s = 2;
  config.timeout_s = 5;
  Engines ranks({0, 1}, config);
  Call got = receive(ranks[0], 1, 6, 4);
  ranks[0].failures.watch(ranks[0].in(4.9));
  bool thrown = false;
  try {
    ranks[0].failures.watch(ranks[0].in(5.1));
  } catch (const Timeout& error) {
    thrown = true;
    CHECK(std::string(error.what()).find("recv from rank 1 with tag 6 has waited 5 s for rank 1") == 0, error.what());
    CHECK(error.missing == std::vector{1});
  }
  CHECK(thrown);
  Engines others({0, 1}, config);
  Call large = send(others[0], 1, 6, bytes_of(2 * kWhole, 1));
  CHECK_THROWS(Timeout, others[0].failures.watch(others[0].in(5.1)));
}

// Adds a set of both ranks, or removes it.
int change_set(Engines& ranks, Opcode opcode, const SetChange& change) {
  std::vector<std::shared_ptr<Handle>> handles;
  for (int rank = 0; rank < 2; ++rank) {
    Request request = sordino::test::barrier_called("change");
    request.opcode = opcode;
    request.set_change = change;
    handles.push_back(ranks[rank].scheduler.submit(std::move(request)));
  }
  while (!handles[0]->done() || !handles[1]->done()) {
    for (int rank = 0; rank < 2; ++rank) ranks[rank].scheduler.announce();
    for (int rank = 0; rank < 2; ++rank) {  // does not move messages
      ranks[rank].transport->poll(ranks[rank].sink);
      ranks[rank].scheduler.decide();
      ranks[rank].scheduler.advance();
    }
  }
  return handles[0]->set_id;
}

Call on_set(Engine& engine, int set, Call call) {
  call.posting->set = set;
  return started(engine, std::move(call));
}

Call send_on(Engine& engine, int set, int to, std::int64_t tag, std::size_t bytes) {
  return on_set(engine, set, make(true, to, tag, bytes_of(bytes, 1)));
}

Call receive_on(Engine& engine, int set, int from, std::int64_t tag, std::size_t bytes) {
  return on_set(engine, set, make(false, from, tag, std::vector<std::byte>(bytes)));
}

void a_removed_set_ends_its_calls() {
  for (const auto& nodes : kPlaces) {
    Engines ranks(nodes);
    const int set = change_set(ranks, Opcode::kAddSet, {{0, 1}});
    std::vector<Call> calls;
    for (const int peer : {0, 1}) {
      calls.push_back(send_on(ranks[0], set, peer, 1, 2 * kWhole));
      calls.push_back(receive_on(ranks[0], set, peer, 2, 2 * kWhole));
    }
    Call stays = receive(ranks[0], 1, 1, 4);
    change_set(ranks, Opcode::kRemoveSet, {{}, set});
    for (int times = 0; times < 3; ++times) {
      ranks.settle();
      for (int rank = 0; rank < 2; ++rank) ranks[rank].failures.watch(ranks[rank].in(0));
    }
    const std::string text = "process set " + std::to_string(set) + " was removed";
    for (const Call& call : calls) CHECK(error_of<UsageError>(*call.handle).find(text) == 0);
    CHECK(!stays.done());
  }
}

// If the data of a message are on their way when its set is removed, both calls succeed; otherwise both fail. Other
// messages leave nothing behind: their room is free again.
void messages_that_a_receive_has_taken_survive_their_set() {
  for (const auto& nodes : kPlaces) {
    for (int polls = 0; polls < 4; ++polls) {
      Engines ranks(nodes);
      const int set = change_set(ranks, Opcode::kAddSet, {{0, 1}});
      std::vector<Call> unreceived;
      for (int number = 0; number < 17; ++number) unreceived.push_back(send_on(ranks[0], set, 1, 5, kWhole));
      Call sent = send_on(ranks[0], set, 1, 1, 20 * kWhole), got = receive_on(ranks[1], set, 0, 1, 20 * kWhole);
      for (int times = 0; times < polls; ++times) ranks[1 - times % 2].poll();
      change_set(ranks, Opcode::kRemoveSet, {{}, set});
      for (int times = 0; times < 3; ++times) {
        for (int rank = 0; rank < 2; ++rank) ranks[rank].failures.watch(ranks[rank].in(0));
        ranks.settle();
      }
      CHECK(sent.done() && got.done() && sent.succeeded() == got.succeeded(), polls);
      CHECK(sent.succeeded() ? got.data == sent.data : !error_of<UsageError>(*sent.handle).empty(), polls);
      CHECK(!ranks[0].messages.busy() && !ranks[1].messages.busy());
      for (int number = 0; number < 13; ++number) {
        Call next = send(ranks[0], 1, 5, bytes_of(kWhole, 1));
        ranks.settle();
        CHECK(next.succeeded(), number);
      }
    }
  }
}

// The receiver has removed the set before the sender, whose later messages take no room.
void messages_that_come_after_the_removal() {
  for (const auto& nodes : kPlaces) {
    Engines ranks(nodes);
    const int set = change_set(ranks, Opcode::kAddSet, {{0, 1}});
    for (int rank = 0; rank < 2; ++rank) {
      Request request = sordino::test::barrier_called("change");
      request.opcode = Opcode::kRemoveSet;
      request.set_change = {{}, set};
      ranks[rank].scheduler.submit(std::move(request));
    }
    ranks[1].poll();
    ranks[0].scheduler.announce();
    ranks[0].transport->poll(ranks[0].sink);
    ranks[0].scheduler.decide();
    for (int times = 0; times < 3; ++times) ranks[1].poll();
    CHECK(!ranks[1].scheduler.sets().contains(set) && ranks[0].scheduler.sets().contains(set));
    for (int number = 0; number < 10; ++number) {
      send_on(ranks[0], set, 1, 5, kWhole);
      for (int times = 0; times < 3; ++times) ranks[1].poll();
    }
    for (int number = 0; number < 13; ++number) {
      Call next = send(ranks[0], 1, 5, bytes_of(kWhole, 1));
      ranks.settle();
      CHECK(next.succeeded(), number);
    }
  }
}

// ---- random programs -----------------------------------------------------------------------------------------------

// Ranks send and receive at random, and poll at random. Each receive gets the message that a model predicts: the next
// of its source and tag. With any source, the messages of each source come in order.
void random_program(unsigned seed) {
  std::mt19937 random(seed);
  const auto draw = [&random](std::size_t below) { return random() % below; };
  const std::vector<std::vector<int>> places{{0, 0}, {0, 1, 1}, {0, 0, 0, 1}, {0, 1, 2}};
  const std::vector<int> nodes = places[draw(places.size())];
  const int size = static_cast<int>(nodes.size());
  Engines ranks(nodes);
  constexpr int kTags = 3, kAnyTag = 9;
  struct Plan {
    int from, to;
    std::int64_t tag;
    std::size_t bytes;
    int number;
  };
  std::vector<Plan> plans;
  for (int number = 0; number < 60; ++number) {
    const bool any = draw(4) == 0;
    const int from = static_cast<int>(draw(static_cast<std::size_t>(size)));
    int to = static_cast<int>(draw(static_cast<std::size_t>(size)));
    if (any && to == from) to = (from + 1) % size;
    const std::size_t bytes = any            ? 4
                              : draw(6) == 0 ? kWhole + draw(3 * kWhole)
                              : draw(8) == 0 ? kWhole
                                             : 4 + draw(300);
    plans.push_back({from, to, any ? kAnyTag : static_cast<std::int64_t>(draw(kTags)), bytes, number});
  }
  const auto content = [](const Plan& plan) {
    auto data = bytes_of(plan.bytes, plan.number);
    std::memcpy(data.data(), &plan.number, std::min(sizeof(plan.number), data.size()));
    return data;
  };
  // Each rank sends in the order of its plans, and receives in its own order, in which messages of one source and tag
  // keep their order.
  std::vector<Call> sends, receives;
  std::vector<Plan> expected;
  std::map<int, std::vector<std::size_t>> to_send, to_receive;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    to_send[plans[i].from].push_back(i);
    auto& order = to_receive[plans[i].to];
    std::size_t at = order.size();
    const auto same = [&](const Plan& one) { return one.from == plans[i].from && one.tag == plans[i].tag; };
    for (std::size_t steps = draw(6); at > 0 && steps > 0 && !same(plans[order[at - 1]]); --steps) --at;
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(at), i);
  }
  std::map<int, std::size_t> sent, received;
  for (int steps = 0; steps < 5000; ++steps) {
    const int rank = static_cast<int>(draw(static_cast<std::size_t>(size)));
    switch (draw(4)) {
      case 0:
        if (sent[rank] < to_send[rank].size()) {
          const Plan& plan = plans[to_send[rank][sent[rank]++]];
          sends.push_back(send(ranks[rank], plan.to, plan.tag, content(plan)));
        }
        break;
      case 1:
        if (received[rank] < to_receive[rank].size()) {
          const Plan& plan = plans[to_receive[rank][received[rank]++]];
          expected.push_back(plan);
          receives.push_back(receive(ranks[rank], plan.tag == kAnyTag ? kAny : plan.from, plan.tag, plan.bytes));
        }
        break;
      default: ranks[rank].poll();
    }
  }
  ranks.settle();
  CHECK(sends.size() == plans.size() && receives.size() == plans.size());
  CHECK(std::all_of(sends.begin(), sends.end(), [](const Call& one) { return one.succeeded(); }), seed);
  std::map<std::pair<int, int>, int> last;  // by receiver and source: the last message with any source
  for (std::size_t i = 0; i < receives.size(); ++i) {
    const Plan& plan = expected[i];
    CHECK(receives[i].succeeded(), seed, plan.number);
    if (!receives[i].succeeded()) continue;
    if (plan.tag != kAnyTag) {
      CHECK(receives[i].data == content(plan) && receives[i].handle->source == plan.from, seed, plan.number);
      continue;
    }
    int number = 0;
    std::memcpy(&number, receives[i].data.data(), sizeof(number));
    const Plan& got = plans[static_cast<std::size_t>(number)];
    CHECK(got.to == plan.to && got.from == receives[i].handle->source && got.tag == kAnyTag, seed, number);
    int& before = last.try_emplace({got.to, got.from}, -1).first->second;
    CHECK(number > before, seed, number);
    before = number;
  }
  for (int rank = 0; rank < size; ++rank) CHECK(!ranks[rank].messages.busy());
}

// ---- worlds of threads ---------------------------------------------------------------------------------------------

std::vector<std::unique_ptr<World>> worlds_on(const std::vector<int>& nodes) {
  std::vector<std::unique_ptr<World>> worlds;
  for (auto& transport : sim::Network(nodes).transports())
    worlds.push_back(std::make_unique<World>(std::move(transport), Config::from_environment()));
  return worlds;
}

void both_send_first() {
  for (const auto& nodes : kPlaces) {
    auto worlds = worlds_on(nodes);
    const auto program = [&](int me) {
      World& world = *worlds[static_cast<std::size_t>(me)];
      for (int turn = 0; turn < 50; ++turn) {
        const std::size_t size = kSizes[static_cast<std::size_t>(turn) % std::size(kSizes)];
        Call out = make(true, 1 - me, turn, bytes_of(size, turn + me));
        out.handle = world.start_message(out.posting);
        Call in = make(false, turn % 2 ? kAny : 1 - me, turn, std::vector<std::byte>(size));
        in.handle = world.run_message(in.posting);
        world.wait(*out.handle);
        CHECK(in.succeeded() && out.succeeded() && in.data == bytes_of(size, turn + 1 - me), turn, me);
      }
    };
    std::thread other([&] { program(1); });
    program(0);
    other.join();
  }
}

void calls_are_checked() {
  auto worlds = worlds_on({0, 0});
  CHECK_THROWS(UsageError, worlds[0]->start_message(make(true, 2, 0, bytes_of(4, 0)).posting));
  CHECK_THROWS(UsageError, worlds[0]->start_message(make(true, kAny, 0, bytes_of(4, 0)).posting));
  CHECK_THROWS(UsageError, worlds[0]->start_message(make(true, 1, -1, bytes_of(4, 0)).posting));
  Call call = make(true, 1, 0, bytes_of(4, 0));
  call.posting->set = 7;
  CHECK_THROWS(UsageError, worlds[0]->start_message(call.posting));
}

// Calls without a partner end with an error when their rank shuts down, and when the other one does.
void shutdown_ends_calls() {
  for (const auto& nodes : kPlaces) {
    auto worlds = worlds_on(nodes);
    std::vector<Call> own, others;
    for (const bool sends : {true, false}) {
      own.push_back(make(sends, 1, sends ? 1 : 2, bytes_of(2 * kWhole, 1)));
      others.push_back(make(sends, 0, sends ? 3 : 4, bytes_of(2 * kWhole, 1)));
    }
    for (Call& call : own) call.handle = worlds[0]->start_message(call.posting);
    for (Call& call : others) call.handle = worlds[1]->start_message(call.posting);
    Call small = make(true, 1, 5, bytes_of(10, 3));
    worlds[0]->run_message(small.posting);
    worlds[0]->shutdown("a reason");
    for (const Call& call : own) CHECK(call.done() && !error_of<Error>(*call.handle).empty());
    for (const Call& call : others) {
      worlds[1]->wait(*call.handle);
      CHECK(error_of<PeerLost>(*call.handle).find("because of a reason") != std::string::npos);
    }
    Call got = make(false, 0, 5, std::vector<std::byte>(10));
    got.handle = worlds[1]->run_message(got.posting);
    CHECK(got.succeeded() && got.data == small.data);
    CHECK_THROWS(Error, worlds[0]->start_message(make(true, 1, 0, bytes_of(4, 0)).posting));
  }
}

// A world that fails ends all calls on all ranks.
void a_failure_ends_calls() {
  for (const auto& nodes : kPlaces) {
    auto worlds = worlds_on(nodes);
    Call in = make(false, 0, 0, std::vector<std::byte>(4)), out = make(true, 0, 0, bytes_of(2 * kWhole, 0));
    in.handle = worlds[1]->start_message(in.posting);
    out.handle = worlds[1]->start_message(out.posting);
    std::thread waiter([&] { worlds[1]->wait(*in.handle); });
    worlds[0]->abort("it is tired");
    waiter.join();
    worlds[1]->wait(*out.handle);
    for (const Call* call : {&in, &out})
      CHECK(error_of<PeerLost>(*call->handle).find("it is tired") != std::string::npos);
  }
}

// The world fails then. The call must end with it, although no list has it any more.
void a_transfer_that_cannot_be_made_ends_its_call() {
  Engines ranks({0, 1}, Config::from_environment(),
                [](std::unique_ptr<Transport> own) { return std::make_unique<test::WithoutRoom>(std::move(own)); });
  const Call out = send(ranks[0], 1, 0, bytes_of(2 * kWhole, 0));
  const Call in = receive(ranks[1], 0, 0, 2 * kWhole);
  std::string why;
  for (int turn = 0; turn < 100 && why.empty(); ++turn) {
    ranks[1].poll();
    try {
      ranks[0].poll();
    } catch (const TransportError& error) {
      why = error.what();
    }
  }
  CHECK(why == "no room" && error_of<TransportError>(*out.handle) == why, why);
  CHECK(!ranks[0].messages.busy() && !in.done());
}

}  // namespace

int main() {
  messages_keep_their_order();
  tags_and_sets_are_separate();
  buffering_has_a_limit();
  a_full_box_delays_sends();
  any_source_takes_the_first();
  a_rank_sends_to_itself();
  both_ranks_learn_of_a_mismatch();
  a_receive_reports_a_refusal();
  shared_tensors_are_read_in_place();
  shared_tensors_of_a_sender_that_has_failed_are_not_taken();
  a_rank_that_leaves();
  a_rank_that_leaves_because_of_another();
  a_transfer_from_a_rank_that_leaves();
  a_rank_dies_within_a_message();
  deadlines();
  a_removed_set_ends_its_calls();
  messages_that_a_receive_has_taken_survive_their_set();
  messages_that_come_after_the_removal();
  for (unsigned seed = 0; seed < 60; ++seed) random_program(seed);
  both_send_first();
  calls_are_checked();
  shutdown_ends_calls();
  a_failure_ends_calls();
  a_transfer_that_cannot_be_made_ends_its_call();
  return test::report();
}
