// Peers may send anything. Every message that the core reads is either valid or refused with an error of the library,
// and reading it takes no more memory than a small multiple of its size. Valid messages are cut short, changed,
// lengthened and mixed, the same in every run. With sanitizers (make sanitize) reads beyond an end are found, too.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "engine/control.h"
#include "engine/message.h"
#include "engine/negotiation.h"
#include "engine/world.h"
#include "membership/consensus.h"
#include "services/mailbox.h"
#include "services/pair_averaging.h"
#include "services/snapshot_store.h"
#include "transport/shm/mailboxes.h"
#include "transport/shm/memory.h"
#include "transport/sim/sim.h"

namespace {

thread_local std::size_t allocated = 0;  // by this thread

// Peers may announce results of any size, but nothing here needs this many bytes.
constexpr std::size_t kMost = std::size_t{1} << 28;

void* take_or_none(std::size_t bytes) noexcept {
  allocated += bytes;
  return bytes > kMost ? nullptr : std::malloc(std::max<std::size_t>(bytes, 1));
}

void* take(std::size_t bytes) {
  void* memory = take_or_none(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Not inline, as the compiler would warn of memory that is freed by another function than its allocator.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return take(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return take(bytes); }
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return take_or_none(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return take_or_none(bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

using namespace sordino;
using membership::Consensus;
using membership::View;

namespace {

using Random = std::mt19937;

std::size_t draw(Random& random, std::size_t below) { return random() % below; }

// ---- messages that are almost right --------------------------------------------------------------------------------

void overwrite(Random& random, Bytes& bytes) {
  constexpr std::uint64_t kNumbers[] = {0,          1,          2,          0x7f,       0x80,
                                        0xff,       0x7fffffff, 0x80000000, 0xffffffff, 1u << 20,
                                        1ull << 40, 1ull << 62, 1ull << 63, ~0ull};
  constexpr std::size_t kWidths[] = {1, 4, 4, 8};
  const std::size_t width = kWidths[draw(random, 4)];
  if (bytes.size() < width) return;
  const std::uint64_t number = kNumbers[draw(random, std::size(kNumbers))];
  std::memcpy(bytes.data() + draw(random, bytes.size() - width + 1), &number, width);
}

Bytes spoilt(Random& random, const std::vector<Bytes>& valid) {
  Bytes bytes = valid[draw(random, valid.size())];
  switch (draw(random, 8)) {
    case 0: bytes.resize(draw(random, bytes.size() + 1)); break;
    case 1:
      for (std::size_t times = 1 + draw(random, 3); times > 0 && !bytes.empty(); --times)
        bytes[draw(random, bytes.size())] ^= std::byte{1} << draw(random, 8);
      break;
    case 2:
    case 3:
    case 4:
      for (std::size_t times = 1 + draw(random, 2); times > 0; --times) overwrite(random, bytes);
      break;
    case 5: {
      const Bytes& other = valid[draw(random, valid.size())];
      bytes.resize(draw(random, bytes.size() + 1));
      bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(draw(random, other.size() + 1)),
                   other.end());
      break;
    }
    case 6: {
      bytes.resize(draw(random, 64));
      for (std::byte& one : bytes) one = static_cast<std::byte>(random());
      break;
    }
    default: break;  // unchanged
  }
  return bytes;
}

// Reads a message of `size` bytes. Checks that this throws only errors of the library, and takes little memory. Returns
// whether the message was read.
template <class Read>
bool reads(std::size_t size, const Read& read) {
  constexpr std::size_t kTimes = 32, kBesides = 4096;
  const std::size_t before = allocated;
  bool read_it = false;
  try {
    read();
    read_it = true;
  } catch (const Error&) {
  } catch (const std::exception& error) {
    CHECK(false && "another error than the library's", error.what());
  }
  CHECK(allocated - before <= kTimes * size + kBesides, allocated - before, "bytes for a message of", size);
  return read_it;
}

// ---- requests and decisions ----------------------------------------------------------------------------------------

constexpr int kMembers = 3;

Announcement say(const std::string& name, Opcode opcode, std::vector<std::int64_t> shape) {
  Announcement said{name, opcode, ReduceOp::kSum, 1, 1, 0, {DType::kFloat32}, {std::move(shape)}, {}};
  if (opcode == Opcode::kAlltoall) said.splits = {1, 1, 2};
  if (opcode == Opcode::kAddSet) said.set_change.ranks = {0, 1};
  return said;
}

std::vector<Announcement> announcements() {
  std::vector<Announcement> all = {say("allreduce", Opcode::kAllreduce, {4}),
                                   say("other", Opcode::kAllreduce, {4}),
                                   say("allgather", Opcode::kAllgather, {4, 2}),
                                   say("alltoall", Opcode::kAlltoall, {4}),
                                   say("broadcast", Opcode::kBroadcast, {4}),
                                   say("reducescatter", Opcode::kReducescatter, {4}),
                                   say("join", Opcode::kJoin, {}),
                                   say("set", Opcode::kAddSet, {})};
  all.push_back(say("several", Opcode::kAllreduce, {2, 3}));
  all.back().dtypes.resize(3, DType::kInt64);
  all.back().shapes.resize(3, {5});
  return all;
}

template <class T>
Bytes written(const T& what) {
  Writer writer;
  what.write(writer);
  return writer.take();
}

std::vector<Decision> decisions() {
  const std::vector<int> all = {0, 1, 2};
  std::vector<Decision> made;
  for (const Announcement& said : announcements()) {
    Decision& decision = made.emplace_back();
    decision.names = {said.name};
    decision.participants = all;
    if (said.opcode == Opcode::kAllgather) decision.merged.rows = {1, 2, 4};
    if (said.opcode == Opcode::kAlltoall) decision.merged.rows = {1, 1, 2, 0, 3, 1, 1, 1, 2};
    if (said.opcode == Opcode::kJoin) decision.merged.last_rank = 1;
    if (said.opcode == Opcode::kAddSet) decision.merged.set_id = 1;
  }
  made.push_back({{"allreduce", "other"}, Verdict::kRun, "", {}, all, {}});
  made.push_back({{"allreduce", "broadcast"}, Verdict::kRun, "", {}, all, {}});
  made.push_back({{"allreduce", "allreduce"}, Verdict::kRun, "", {}, all, {}});
  made.push_back({{"broadcast"}, Verdict::kRun, "", {}, {1, 2}, {}});
  made.push_back({{"allgather"}, Verdict::kRun, "", {}, all, {{1, 2, 8}}});
  made.push_back({{"allgather"}, Verdict::kRun, "", {}, all, {{1, std::int64_t{1} << 61, 4}}});
  made.push_back({{"allgather"}, Verdict::kRun, "", {}, all, {{1, std::int64_t{1} << 40, 4}}});
  made.push_back({{"allgather"}, Verdict::kRun, "", {}, all, {}});
  made.push_back({{"alltoall"}, Verdict::kRun, "", {}, all, {{1, 1}}});
  made.push_back({{"alltoall"}, Verdict::kRun, "", {}, all, {{1, 1, 2, 0, 3, 1, 1, 1, 100}}});
  made.push_back({{"set"}, Verdict::kRun, "", {}, all, {{}, -1, -5}});
  made.push_back({{"set"}, Verdict::kRun, "", {}, all, {}});
  made.push_back({{}, Verdict::kRun, "", {}, all, {}});
  made.push_back({{"allreduce"}, Verdict::kRun, "", {}, {2, 7}, {}});
  made.push_back({{"allreduce"}, Verdict::kRun, "", {}, {2, 2}, {}});
  made.push_back({{"allreduce"}, Verdict::kRun, "", {}, {-1, 2}, {}});
  made.push_back({{"barrier"}, Verdict::kMismatch, "they differ", {}, all, {}});
  made.push_back({{"barrier"}, Verdict::kPeerLost, "it is gone", {1}, all, {}});
  made.push_back({{"barrier"}, Verdict::kPeerLost, "it is gone", {99}, all, {}});
  return made;
}

void lengths_are_not_believed() {
  // The list announces as many elements as there are bytes, and each element is longer.
  Bytes bytes = Writer().put(std::uint32_t{1} << 16).take();
  bytes.resize(bytes.size() + (std::size_t{1} << 16));
  for (int type = 0; type < 2; ++type) {
    const std::size_t before = allocated;
    Reader reader(bytes);
    if (type == 0) {
      CHECK_THROWS(TransportError, reader.list<std::int64_t>());
    } else {
      CHECK_THROWS(TransportError, reader.list<std::string>());
    }
    CHECK(allocated - before < 4096, allocated - before);
  }
}

bool not_negative(const std::vector<std::int64_t>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](std::int64_t number) { return number >= 0; });
}

// Later code relies on these properties of all announcements.
void check(const Announcement& said) {
  CHECK(said.opcode <= kLastOpcode && said.op <= kLastReduceOp && said.root >= 0);
  CHECK(not_negative(said.splits) && said.shapes.size() == said.dtypes.size());
  for (std::size_t index = 0; index < said.dtypes.size(); ++index) {
    CHECK(static_cast<int>(said.dtypes[index]) < kDTypeCount && not_negative(said.shapes[index]));
    CHECK(!said.shapes[index].empty() || (said.opcode != Opcode::kAllgather && said.opcode != Opcode::kAlltoall));
  }
}

void check(const Decision& decision) {
  CHECK(decision.verdict <= kLastVerdict && !decision.names.empty());
  const auto& some = decision.participants;
  CHECK(std::set<int>(some.begin(), some.end()).size() == some.size() && std::is_sorted(some.begin(), some.end()));
}

void negotiations() {
  std::vector<Bytes> said, decided;
  for (const Announcement& one : announcements()) said.push_back(written(one));
  for (const Decision& one : decisions()) decided.push_back(written(one));
  Random random(1);
  for (int turn = 0; turn < 4000; ++turn) {
    Negotiation talk({0, 4, 7}, 1 << 20);
    for (int message = 0; message < 6; ++message) {
      const auto member = static_cast<int>(draw(random, kMembers));
      if (draw(random, 20) == 0) talk.note_left(member, {"rank 7, which has shut down", {7}});
      const Bytes bytes = spoilt(random, said);
      std::optional<Announcement> one;
      reads(bytes.size(), [&] {
        Reader reader(bytes);
        one = Announcement::read(reader);
      });
      if (!one) continue;
      check(*one);
      try {
        talk.announce(member, *one, {});
        for (const Decision& decision : talk.decide()) {
          CHECK(!decision.names.empty() && !decision.participants.empty());
          written(decision);
        }
        talk.waiting();
      } catch (const Error&) {
        break;  // the world would end here
      }
    }
    const Bytes bytes = spoilt(random, decided);
    std::optional<Decision> decision;
    // Each run of a damaged list may have as many numbers as the whole list.
    reads(bytes.size() + 65600 * kMembers, [&] {
      Reader reader(bytes);
      decision = Decision::read(reader, kMembers);
    });
    if (decision) check(*decision);
  }
  // The same name twice would count for the member that has not announced it.
  Negotiation talk({0, 1}, 0);
  talk.announce(0, announcements()[0], {});
  CHECK_THROWS(TransportError, talk.announce(0, announcements()[0], {}));
  // No id follows the largest number.
  Announcement largest = say("set", Opcode::kAddSet, {});
  for (const int newest : {std::numeric_limits<int>::max() - 1, std::numeric_limits<int>::max(), -1}) {
    largest.known_sets.newest = newest;
    const Bytes bytes = written(largest);
    Reader reader(bytes);
    if (newest == std::numeric_limits<int>::max() - 1) {
      Announcement::read(reader);
    } else {
      CHECK_THROWS(TransportError, Announcement::read(reader));
    }
  }
  // Splits for two of three ranks.
  Negotiation splits({0, 1, 2}, 0);
  for (int member = 0; member < 3; ++member) {
    Announcement one = say("alltoall", Opcode::kAlltoall, {4});
    if (member == 1) one.splits = {1, 3};
    splits.announce(member, one, {});
  }
  CHECK(splits.decide().at(0).verdict == Verdict::kMismatch);
}

// ---- agreement -----------------------------------------------------------------------------------------------------

// Returns the messages of all ranks when one is lost.
std::vector<Bytes> agreement_messages() {
  std::vector<Bytes> said;
  std::vector<std::unique_ptr<Consensus>> ranks;
  std::deque<std::pair<std::pair<int, int>, Bytes>> under_way;
  const View all{0, {0, 1, 2, 3, 4}, 0};
  for (int self = 0; self < 5; ++self) {
    ranks.push_back(std::make_unique<Consensus>(all, self, [&, self](int to, const Bytes& message) {
      said.push_back(message);
      under_way.push_back({{self, to}, message});
    }));
    ranks.back()->count_tags(self);
  }
  ranks[1]->bury(0, "killed");
  ranks[3]->accuse(4, "it does not come");
  ranks[2]->begin();
  while (!under_way.empty()) {
    const auto [way, message] = under_way.front();
    under_way.pop_front();
    if (way.second == 0) continue;
    Reader reader(message);
    ranks[static_cast<std::size_t>(way.second)]->receive(way.first, reader);
  }
  said.push_back(Consensus::verdict({1, {0, 1, 2}, 3}));
  said.push_back(Consensus::verdict({0xffffffff, {0, 1, 2}, 3}));
  said.push_back(Consensus::verdict({1, {}, 3}));
  said.push_back(Consensus::verdict({1, {0, 1, 9}, 3}));
  said.push_back(Consensus::verdict({1, {1, 1}, 3}));
  said.push_back(Consensus::verdict({1, {1, 2}, -3}));
  return said;
}

void agreements() {
  const std::vector<Bytes> said = agreement_messages();
  Random random(2);
  for (int turn = 0; turn < 6000; ++turn) {
    std::size_t sent = 0;
    const View all{0, {0, 1, 2, 3, 4}, 0};
    Consensus agreement(all, static_cast<int>(draw(random, 5)), [&](int to, const Bytes&) {
      ++sent;
      CHECK(to >= 0 && to < 5);
    });
    for (int message = 0; message < 8; ++message) {
      const Bytes bytes = spoilt(random, said);
      try {
        Reader reader(bytes);
        agreement.receive(static_cast<int>(draw(random, 5)), reader);
        agreement.retry();
      } catch (const Error&) {
      }
    }
    CHECK(sent < 1000);
    const auto& view = agreement.decided();
    if (!view) continue;
    CHECK(view->epoch == 1 && !view->members.empty() && view->first_tag >= 0);
    CHECK(std::is_sorted(view->members.begin(), view->members.end()));
    CHECK(view->members.front() >= 0 && view->members.back() < 5);
  }
}

// ---- worlds --------------------------------------------------------------------------------------------------------

constexpr int kMailbox = 0, kSnapshots = 1, kAveraging = 2;

template <class... Fields>
Bytes message(Message kind, const Fields&... fields) {
  Writer writer;
  writer.put(kind);
  (writer.put(fields), ...);
  return writer.take();
}

Bytes joined(Bytes head, const Bytes& rest) {
  head.insert(head.end(), rest.begin(), rest.end());
  return head;
}

std::vector<Bytes> world_messages() {
  const std::string text = "a text";
  std::vector<Bytes> all;
  for (const int set : {0, 0, 0, 1, -1}) {
    for (const Announcement& said : announcements())
      all.push_back(joined(message(Message::kAnnounce, set), written(said)));
    for (const Decision& decision : decisions())
      all.push_back(joined(message(Message::kDecision, set), written(decision)));
    all.push_back(message(Message::kStalled, set, text));
  }
  all.push_back(message(Message::kSharedBlock, 0, Location{}));
  all.push_back(message(Message::kFreed, std::vector<std::uint64_t>{1, 2, 3}));
  all.push_back(goodbye(text, {1}));
  all.push_back(goodbye(text, {99}));
  for (const Failure failure : {Failure::kPeerLost, Failure::kTimeout, Failure::kOther})
    all.push_back(message(Message::kFailed, failure, text, text, std::vector<int>{1}));
  all.push_back(message(Message::kFailed, Failure::kPeerLost, text, text, std::vector<int>{99}));
  all.push_back(message(static_cast<Message>(77), text));
  constexpr Tag kTag = static_cast<Tag>(kTagSets) << kTagSequenceBits | 3;
  for (int times = 0; times < 4; ++times) {
    all.push_back(message(Message::kService, kMailbox, text));
    all.push_back(message(Message::kService, kSnapshots, std::uint8_t{0}, std::uint64_t{1}, kTag));  // request
    all.push_back(message(Message::kService, kSnapshots, std::uint8_t{1}, std::uint64_t{1}, std::uint64_t{2},
                          std::uint64_t{3}, 0.5));  // answer
    all.push_back(message(Message::kService, kAveraging, std::uint64_t{1}));
    all.push_back(message(Message::kService, kAveraging, std::uint64_t{1}, kTag));
  }
  all.push_back(message(Message::kClosed, kSnapshots));
  // Point-to-point messages: all words, of messages that were sent and of others.
  for (const std::uint64_t bytes : {std::uint64_t{8}, std::uint64_t{1} << 20}) {
    const bool whole = bytes == 8;
    const Envelope envelope{
        1, 5, bytes, 0, DType::kFloat32, whole ? Envelope::Form::kWhole : Envelope::Form::kAnnounced, 0};
    const Bytes payload = whole ? Bytes(8) : Writer().put(Location{}).take();
    all.push_back(joined(message(Message::kMessage, std::uint8_t{0}, envelope), payload));
  }
  all.push_back(message(Message::kMessage, std::uint8_t{1}, Location{1, 4096, 0, 0, 0, 0, 0, {}}));
  for (const std::uint64_t number : {0, 1, 2, 3}) {
    all.push_back(message(Message::kMessage, std::uint8_t{2}, number, kTag));
    all.push_back(message(Message::kMessage, std::uint8_t{3}, number));
    all.push_back(message(Message::kMessage, std::uint8_t{4}, number, text));
    all.push_back(message(Message::kMessage, std::uint8_t{5}, 100 * number));
  }
  return all;
}

std::vector<Bytes> with_epochs(const std::vector<Bytes>& messages) {
  constexpr std::uint32_t kNotices = 0xffffffff;
  std::vector<Bytes> all;
  for (const Bytes& one : messages) all.push_back(joined(Writer().put(std::uint32_t{0}).take(), one));
  all.push_back(joined(Writer().put(std::uint32_t{1}).take(), messages[0]));
  for (const Bytes& one : agreement_messages())
    all.push_back(joined(Writer().put(kNotices).put(std::uint8_t{1}).put(std::uint32_t{0}).take(), one));
  for (std::uint8_t kind = 0; kind < 6; ++kind) {
    for (const std::uint32_t epoch : {0u, 1u})
      all.push_back(Writer().put(kNotices).put(kind).put(epoch).put(std::string("why")).take());
  }
  return all;
}

// A world of three ranks on three nodes, or on one. Only `me` is real; the test makes the messages of the others.
class Victim {
 public:
  Victim(const std::vector<int>& nodes, int me, bool survives_losses) : me_(me), survives_losses_(survives_losses) {
    Config config = Config::from_environment();
    config.survive_losses = survives_losses;
    transports_ = sim::Network(nodes).transports();
    const std::vector<TensorSpec> tensors = {{"w", DType::kFloat32, {8}}};
    const auto layout = std::make_shared<Layout>(tensors, std::size_t{1} << 20);
    world_ = std::make_unique<World>(std::move(transports_[static_cast<std::size_t>(me)]), config);
    mailbox_ = std::make_shared<Mailbox>(world_->service_context(), kMailbox);
    snapshots_ = std::make_shared<SnapshotStore>(world_->service_context(), kSnapshots, layout, mailbox_);
    averaging_ = std::make_shared<PairAveraging>(world_->service_context(), kAveraging, layout, values_, mailbox_);
    world_->open_service(kMailbox, mailbox_);
    world_->open_service(kSnapshots, snapshots_);
    world_->open_service(kAveraging, averaging_);
    snapshots_->publish(values_, 1);
  }
  ~Victim() {
    world_->abort("the test is over");
    for (const auto& handle : handles_) {
      CHECK(handle->done());
      if (handle->done()) is_ours(handle->error);
    }
  }

  // Starts work that concerns the other ranks: one operation of each kind, a pull and an averaging.
  void submit() {
    for (const Announcement& said : announcements()) {
      Request request;
      request.name = said.name;
      request.opcode = said.opcode;
      request.op = said.op;
      request.splits = said.splits;
      request.set_change = said.set_change;
      const bool moves = said.opcode != Opcode::kJoin && said.opcode != Opcode::kAddSet;
      for (std::size_t index = 0; moves && index < said.dtypes.size(); ++index) {
        const bool has_output = said.opcode == Opcode::kAllreduce || said.opcode == Opcode::kBroadcast;
        request.tensors.push_back({said.dtypes[index], said.shapes[index], values_, has_output ? outputs_ : nullptr});
      }
      handles_.push_back(world_->submit(std::move(request)));
    }
    snapshots_->pull((me_ + 1) % 3, std::chrono::steady_clock::now());
    averaging_->begin((me_ + 1) % 3, 1);
  }
  void post(int from, const Bytes& bytes) { transports_[static_cast<std::size_t>(from)]->post(me_, bytes); }
  // Returns whether the world still works after it has read all that was posted.
  bool lives(int from) {
    const std::string end = "end " + std::to_string(++ends_);
    Bytes bytes = message(Message::kService, kMailbox, end);
    post(from, survives_losses_ ? joined(Writer().put(std::uint32_t{0}).take(), bytes) : bytes);
    try {
      for (int turn = 0; turn < 200; ++turn) {
        for (const Mailbox::Event& event : mailbox_->wait(0.1)) {
          if (event.text == end) return !world_->failed();  // messages arrive even if the world failed
        }
      }
      CHECK(false && "neither an answer nor an error");
    } catch (...) {
      is_ours(std::current_exception());
    }
    return false;
  }

 private:
  static void is_ours(const std::exception_ptr& failure) {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const Error&) {
    } catch (const std::exception& error) {
      CHECK(false && "another error than the library's", error.what());
    }
  }

  const int me_;
  const bool survives_losses_;
  int ends_ = 0;
  alignas(64) std::byte values_[1024]{}, outputs_[1024]{};
  std::vector<std::unique_ptr<Transport>> transports_;
  std::unique_ptr<World> world_;
  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<SnapshotStore> snapshots_;
  std::shared_ptr<PairAveraging> averaging_;
  std::vector<std::shared_ptr<Handle>> handles_;
};

void worlds(int me, bool survives_losses, unsigned seed, int turns) {
  const std::vector<Bytes> said = survives_losses ? with_epochs(world_messages()) : world_messages();
  Random random(seed);
  std::unique_ptr<Victim> victim;
  for (int turn = 0; turn < turns; ++turn) {
    if (!victim) {
      victim = std::make_unique<Victim>(std::vector<int>{0, 1, 2}, me, survives_losses);
      victim->submit();
    }
    const auto from = (me + 1 + static_cast<int>(draw(random, 2))) % 3;
    victim->post(from, spoilt(random, said));
    if (!victim->lives(from)) victim = nullptr;
  }
}

// Among node peers, a block may be announced once only, and must fit its memory.
void shared_blocks() {
  for (const bool twice : {false, true}) {
    Victim victim({0, 0, 0}, 0, false);
    alignas(64) static std::byte block[1 << 20]{};
    Location place;
    place.segment = 1;
    place.bytes = twice ? sizeof block : sizeof block - 1;
    place.offset = twice ? 0 : sizeof block - 64;
    place.key = reinterpret_cast<std::uint64_t>(block);
    if (twice) {
      place.bytes = SharedBlock::bytes_for(Config::from_environment().chunk_bytes);
      victim.post(1, message(Message::kSharedBlock, 0, place));
      CHECK(victim.lives(1));
    }
    victim.post(1, message(Message::kSharedBlock, 0, place));
    CHECK(!victim.lives(1));
  }
}

// ---- mailboxes --------------------------------------------------------------------------------------------------

// A reader that waited for the end of such a message would take all other messages for parts of it.
void absurd_lengths_are_not_waited_for() {
  constexpr std::size_t kLength = 100, kCounters = 2 * 64;  // of a ring, before its bytes
  for (const std::uint32_t length : {(1u << 28) + 1, 0x80000000u, 0xffffffffu}) {
    shm::ShmMemory memory;
    const auto mine = memory.allocate(shm::Mailboxes::bytes_for(2));
    const auto other = memory.allocate(shm::Mailboxes::bytes_for(2));
    const std::vector<std::byte*> boxes{mine->data, other->data};
    shm::Mailboxes reader({0, 1}, 0, boxes), writer({0, 1}, 1, boxes);
    writer.post(0, Bytes(kLength));
    writer.post(0, Bytes(kLength));
    // The second message, in the second ring of the reader's box.
    std::byte* ring = mine->data + shm::Mailboxes::bytes_for(1) + kCounters;
    std::memcpy(ring + sizeof(length) + kLength, &length, sizeof(length));
    int delivered = 0;
    const auto count = [&](int from, std::span<const std::byte> message) {
      CHECK(from == 1 && message.size() == kLength, from, message.size());
      ++delivered;
    };
    CHECK_THROWS(TransportError, reader.poll(count));
    CHECK(delivered == 1, delivered);
  }
}

}  // namespace

int main() {
  absurd_lengths_are_not_waited_for();
  lengths_are_not_believed();
  negotiations();
  agreements();
  worlds(0, false, 3, 1500);
  worlds(2, false, 4, 3000);
  worlds(2, true, 5, 1500);
  shared_blocks();
  return sordino::test::report();
}
