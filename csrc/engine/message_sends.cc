// The sender's side of point-to-point messages.
#include <cstring>
#include <utility>

#include "engine/control.h"
#include "engine/point_to_point.h"

namespace sordino {

void PointToPoint::start_send(const std::shared_ptr<Posting>& send) {
  if (send->peer == rank_) return send_to_self(send);
  if (common_.peers.gone(send->peer)) return finish(*send, departed(*send, send->peer));
  Outgoing& out = out_[send->peer];
  if (!out.refused.empty()) {
    return finish(*send, std::make_exception_ptr(OperationMismatch(std::exchange(out.refused, {}))));
  }
  out.queue.push_back(send);
  ++queued_;
  flush(send->peer);
}

Envelope PointToPoint::describe(const Posting& send, Outgoing& out, bool whole) const {
  return {.number = ++out.last_number,
          .tag = send.tag,
          .bytes = send.bytes,
          .set = send.set,
          .dtype = send.dtype,
          .form = whole ? Envelope::Form::kWhole : Envelope::Form::kAnnounced,
          .unused = 0};
}

// A large message stays in the caller's memory until a receive takes it.
void PointToPoint::send_to_self(const std::shared_ptr<Posting>& send) {
  Outgoing& out = out_[rank_];
  const bool whole = send->bytes <= kWholeBytes && buffered(out) + kOverhead + send->bytes <= kBufferedBytes;
  const Envelope envelope = describe(*send, out, whole);
  if (whole) out.sent += cost(envelope);
  const std::shared_ptr<Arrival> message = begin(rank_, envelope);
  if (whole) {
    if (send->bytes > 0) std::memcpy(message->into, send->data, send->bytes);
    message->arrived = send->bytes;
    finish(*send);
  } else {
    message->own = send;
  }
  if (message->taker) hand_over(message->taker, *message);
}

std::uint64_t PointToPoint::buffered(const Outgoing& out) const {
  return out.sent - (out.box ? out.box->consumed() : out.consumed);
}

bool PointToPoint::flush(int to) {
  std::deque<std::shared_ptr<Posting>>& queue = out_[to].queue;
  bool moved = false;
  while (!queue.empty() && put(to, queue.front())) {
    queue.pop_front();
    --queued_;
    moved = true;
  }
  return moved;
}

// Sends the envelope, with the data of a whole message. Returns false if the fast box has no room.
bool PointToPoint::put(int to, const std::shared_ptr<Posting>& send) {
  Outgoing& out = out_[to];
  const bool near = is_near(to);
  if (near && !out.box) open_box(to);
  const bool whole = send->bytes <= kWholeBytes && buffered(out) + kOverhead + send->bytes <= kBufferedBytes;
  Location place;
  std::span<const std::byte> payload(send->data, send->bytes);
  if (!whole) {
    if (near && send->bytes > 0) place = common_.transport.node_memory().offer(send->data, send->bytes);
    if (place.device != 0) place = {};
    payload = std::as_bytes(std::span(&place, 1));
  }
  if (near && !out.box->has_room(payload.size())) return false;
  const Envelope envelope = describe(*send, out, whole);
  send->number = envelope.number;
  if (near) {
    out.box->write(envelope, payload, [&] { common_.transport.ring(to); });
  } else {
    post(to, Writer().put(Message::kMessage).put(Word::kEnvelope).put(envelope).put_rest(payload));
  }
  if (whole) {
    out.sent += cost(envelope);
    common_.traffic.count(common_.transport, to, send->bytes);
    finish(*send);
  } else {
    out.announced.emplace(envelope.number, send);
  }
  return true;
}

void PointToPoint::open_box(int to) {
  Outgoing& out = out_[to];
  NodeMemory& memory = common_.transport.node_memory();
  out.segment = memory.allocate(FastBox::bytes());
  out.box.emplace(out.segment->data);
  post(to, Writer().put(Message::kMessage).put(Word::kFastBox).put(memory.locate(out.segment->data, FastBox::bytes())));
}

std::shared_ptr<Posting> PointToPoint::take_announced(int from, std::uint64_t number) {
  Numbered& announced = out_[from].announced;
  const auto found = announced.find(number);
  if (found == announced.end()) return nullptr;
  std::shared_ptr<Posting> send = std::move(found->second);
  announced.erase(found);
  return send;
}

// Sends the data that the receiver has asked for.
void PointToPoint::give(int to, std::uint64_t number, Tag tag) {
  const std::shared_ptr<Posting> send = take_announced(to, number);
  if (send && tag >= (Tag{1} << kTagBits)) out_[to].announced.emplace(number, send);
  if (!send || tag >= (Tag{1} << kTagBits))
    throw TransportError("rank " + std::to_string(to) + " asks for a message that was not announced to it");
  common_.traffic.count(common_.transport, to, send->bytes);
  move(send, to, [&] { return common_.transport.send(to, tag, std::span<const std::byte>(send->data, send->bytes)); });
}

void PointToPoint::take_refusal(int from, Reader& reader) {
  const auto number = reader.get<std::uint64_t>();
  const auto why = reader.one_of(kLastRefusal);
  const std::string text = reader.text();
  Outgoing& out = out_[from];
  if (number == 0 || number > out.last_number)
    throw TransportError("rank " + std::to_string(from) + " refuses a message that was not sent to it");
  if (const std::shared_ptr<Posting> send = take_announced(from, number)) {
    finish(*send, why == Refusal::kRemoved ? without_set(*send) : std::make_exception_ptr(OperationMismatch(text)));
  } else if (why == Refusal::kMismatch && out.refused.empty()) {
    out.refused = text + ". This send was over before, so this later call reports it, and has done nothing else";
  }
}

}  // namespace sordino
