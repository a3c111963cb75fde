#include "transport/shm/pipes.h"

#include <algorithm>

namespace sordino::shm {
namespace {

// Both sides use the ring at once, so it should fit in the caches of two cores. A chunk is the part that the writer
// puts before the reader may begin with it.
constexpr std::size_t kCapacity = 512 * 1024, kChunk = 128 * 1024;
// Upper bound of a message, which is an operation's buffer: no rank sends more than a machine can hold. The bound
// protects memory, because memory is allocated for data that comes early.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 40;

}  // namespace

class Pipes::SendTransfer : public Transfer {
 public:
  explicit SendTransfer(std::shared_ptr<Sending> state) : state_(std::move(state)) {}
  ~SendTransfer() override { state_->dropped = true; }
  bool test() override { return state_->done; }

 private:
  std::shared_ptr<Sending> state_;
};

class Pipes::ReceiveTransfer : public Transfer {
 public:
  explicit ReceiveTransfer(std::shared_ptr<Receiving> state) : state_(std::move(state)) {}
  ~ReceiveTransfer() override { state_->dropped = true; }
  bool test() override {
    if (!state_->error.empty()) throw TransportError(state_->error);
    return state_->done;
  }

 private:
  std::shared_ptr<Receiving> state_;
};

Pipes::Pipes(ShmMemory& memory, std::vector<int> here, std::function<void(int, const Location&)> tell,
             std::function<void(int)> ring)
    : memory_(memory),
      here_(std::move(here)),
      tell_(std::move(tell)),
      ring_(std::move(ring)),
      out_(here_.size()),
      in_(here_.size()) {}

std::unique_ptr<Transfer> Pipes::send(int to, Tag tag, std::span<const std::byte> data) {
  const auto index = static_cast<std::size_t>(to);
  Outgoing& out = out_[index];
  if (!out.ring) {
    out.segment = memory_.allocate(Ring::bytes_for(kCapacity));
    out.ring.emplace(out.segment->data, kCapacity);
    tell_(to, memory_.locate(out.segment->data, out.segment->bytes));
  }
  auto state = std::make_shared<Sending>(Sending{.tag = tag, .data = data});
  out.queue.push_back(state);
  push(index);
  return std::make_unique<SendTransfer>(std::move(state));
}

std::unique_ptr<Transfer> Pipes::receive(int from, Tag tag, std::span<std::byte> data) {
  const auto index = static_cast<std::size_t>(from);
  Incoming& in = in_[index];
  auto state = std::make_shared<Receiving>(Receiving{.tag = tag, .data = data});
  const auto early = std::find_if(in.unclaimed.begin(), in.unclaimed.end(),
                                  [tag](const auto& message) { return message->first.tag == tag; });
  if (early == in.unclaimed.end()) {
    in.waiting.push_back(state);
  } else {
    Message& message = **early;
    hand_over(index, message, state);
    if (message.taker) std::memcpy(data.data(), message.early.data(), message.early.size());
    state->done = message.taker && message.arrived == message.first.total;
    message.early = Bytes();
    in.unclaimed.erase(early);
  }
  return std::make_unique<ReceiveTransfer>(std::move(state));
}

void Pipes::open(int from, const Location& place) {
  if (in_[static_cast<std::size_t>(from)].ring || place.offset != 0 || place.bytes != Ring::bytes_for(kCapacity))
    throw TransportError("rank " + std::to_string(here_[from]) + " sent the location of a pipe that is not valid");
  in_[static_cast<std::size_t>(from)].ring.emplace(memory_.map(here_[from], place), kCapacity);
}

bool Pipes::poll() {
  bool moved = false;
  for (std::size_t index = 0; index < here_.size(); ++index) {
    if (!out_[index].queue.empty()) moved |= push(index);
    if (!out_[index].taken_soon.empty()) moved |= confirm(out_[index]);
    if (in_[index].ring) moved |= pull(index);
  }
  return moved;
}

// ---- sending -------------------------------------------------------------------------------------------------------

bool Pipes::push(std::size_t to) {
  Outgoing& out = out_[to];
  bool moved = false;
  while (!out.queue.empty()) {
    Sending& one = *out.queue.front();
    const std::size_t room = out.ring->room();
    if (one.dropped && !one.begun) {
      out.queue.pop_front();
      continue;
    }
    if (room < sizeof(Head) + std::min<std::size_t>(one.data.size() - one.sent, 4096)) break;
    const std::size_t bytes = one.dropped ? 0 : std::min({one.data.size() - one.sent, room - sizeof(Head), kChunk});
    const Head head{one.tag, static_cast<std::uint32_t>(bytes), one.sent, one.data.size()};
    out.ring->put(&head, sizeof(head));
    out.ring->put(one.data.data() + one.sent, bytes);
    out.ring->publish();
    ring_(static_cast<int>(to));
    one.begun = moved = true;
    one.sent += bytes;
    if (!one.dropped && one.sent < one.data.size()) continue;
    one.end = out.ring->put_so_far();
    if (!one.dropped) out.taken_soon.push_back(out.queue.front());
    out.queue.pop_front();
  }
  return moved;
}

bool Pipes::confirm(Outgoing& out) {
  bool any = false;
  while (!out.taken_soon.empty() && out.ring->has_taken(out.taken_soon.front()->end)) {
    any = out.taken_soon.front()->done = true;
    out.taken_soon.pop_front();
  }
  return any;
}

// ---- receiving -----------------------------------------------------------------------------------------------------

bool Pipes::pull(std::size_t from) {
  Incoming& in = in_[from];
  bool moved = false;
  for (std::size_t ready = in.ring->ready(); ready > 0; ready = in.ring->ready()) {
    bool awaited = ready > kCapacity / 2;  // its writer may be waiting for space, or (below) for the end of a message
    if (!in.head) {
      // A head is put together with its chunk, so it is always complete.
      Head head;
      if (ready < sizeof(head)) throw TransportError("the pipe of rank " + std::to_string(here_[from]) + " is damaged");
      in.ring->take(&head, sizeof(head));
      begin(in, head);
      ready -= sizeof(head);
    }
    fill(in, std::min<std::size_t>(ready, in.head->offset + in.head->bytes - in.message->arrived));
    in.ring->release();
    moved = true;
    Message& message = *in.message;
    awaited |= message.arrived == message.first.total;
    if (awaited) ring_(static_cast<int>(from));
    if (message.arrived < in.head->offset + in.head->bytes) continue;
    const bool given_up = in.head->bytes == 0 && message.arrived < message.first.total;
    in.head.reset();
    if (given_up) {
      std::erase(in.unclaimed, in.message);
      in.message.reset();
    } else if (message.arrived == message.first.total) {
      if (message.taker) message.taker->done = true;
      in.message.reset();
    }
  }
  return moved;
}

// Begins a chunk: the next one of the current message, or the first one of another message.
void Pipes::begin(Incoming& in, const Head& head) {
  const auto from = static_cast<std::size_t>(&in - in_.data());
  const bool plausible = head.total <= kMostBytes && head.bytes <= head.total - std::min(head.total, head.offset) &&
                         (in.message ? head.tag == in.message->first.tag && head.total == in.message->first.total &&
                                           head.offset == in.message->arrived
                                     : head.offset == 0);
  if (!plausible) throw TransportError("the pipe of rank " + std::to_string(here_[from]) + " is damaged");
  in.head = head;
  if (in.message) return;
  in.message = std::make_shared<Message>(Message{.first = head});
  std::erase_if(in.waiting, [](const auto& one) { return one->dropped; });
  const auto taker =
      std::find_if(in.waiting.begin(), in.waiting.end(), [&](const auto& one) { return one->tag == head.tag; });
  if (taker == in.waiting.end()) {
    in.unclaimed.push_back(in.message);
  } else {
    hand_over(from, *in.message, *taker);
    in.waiting.erase(taker);
  }
}

void Pipes::hand_over(std::size_t from, Message& message, const std::shared_ptr<Receiving>& taker) {
  if (taker->data.size() == message.first.total) {
    message.taker = taker;
  } else {
    taker->error = "rank " + std::to_string(here_[from]) + " sent " + std::to_string(message.first.total) +
                   " bytes where " + std::to_string(taker->data.size()) + " were expected";
  }
}

// Moves bytes of the chunk to the receive that takes them. Keeps them if no receive has asked for the message yet.
void Pipes::fill(Incoming& in, std::size_t bytes) {
  Message& message = *in.message;
  if (message.taker && !message.taker->dropped) {
    in.ring->take(message.taker->data.data() + message.arrived, bytes);
  } else if (std::find(in.unclaimed.begin(), in.unclaimed.end(), in.message) != in.unclaimed.end()) {
    message.early.resize(message.arrived + bytes);
    in.ring->take(message.early.data() + message.arrived, bytes);
  } else {
    in.ring->skip(bytes);
  }
  message.arrived += bytes;
}

}  // namespace sordino::shm
