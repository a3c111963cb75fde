// The receiver's side of point-to-point messages.
#include <atomic>
#include <cstring>
#include <utility>

#include "engine/control.h"
#include "engine/point_to_point.h"

namespace sordino {
namespace {

bool fits(const Posting& receive, const Envelope& envelope) {
  return receive.bytes == envelope.bytes && receive.dtype == envelope.dtype;
}

std::string elements(std::size_t bytes, DType dtype) {
  return std::to_string(bytes / size_of(dtype)) + " elements of " + std::string(name_of(dtype));
}

}  // namespace

void PointToPoint::start_receive(const std::shared_ptr<Posting>& receive) {
  if (receive->peer != Posting::kAnySource && receive->peer != rank_) {
    std::string& refused = out_[receive->peer].refused;
    if (!refused.empty())
      return finish(*receive, std::make_exception_ptr(OperationMismatch(std::exchange(refused, {}))));
  }
  const std::shared_ptr<Arrival> message = queues_.take_message(*receive);
  if (!message) {
    if (is_without_source(*receive)) {
      const int gone = receive->peer == Posting::kAnySource ? receive->sources.front() : receive->peer;
      return finish(*receive, departed(*receive, gone));
    }
    return queues_.add(receive);
  }
  if (message->complete()) return hand_over(receive, *message);
  message->taker = receive;  // read_box() hands it over
}

// Creates the Arrival of a message whose payload may still be incomplete, and gives it to a waiting receive, if any.
std::shared_ptr<Arrival> PointToPoint::begin(int from, const Envelope& envelope) {
  auto message = std::make_shared<Arrival>(Arrival{.from = from, .envelope = envelope});
  message->taker = queues_.take_receive(from, envelope);
  const bool whole = envelope.form == Envelope::Form::kWhole;
  if (whole && message->taker && fits(*message->taker, envelope)) {
    message->into = message->taker->data;
  } else if (whole || from != rank_) {
    message->data.resize(envelope.payload());
    message->into = message->data.data();
  }
  if (!message->taker) queues_.add(message);
  return message;
}

void PointToPoint::complete(const Arrival& message) {
  if (message.taker) return hand_over(message.taker, message);
  if (is_removed(message.envelope.set)) end_removed();  // its sender had not removed the set yet
}

// Gives a receive its message, whose payload is complete. An error ends the receive here, because it is in no list that
// end() searches.
void PointToPoint::hand_over(const std::shared_ptr<Posting>& receive, const Arrival& message) {
  try {
    deliver(receive, message);
  } catch (...) {
    finish(*receive, std::current_exception());
    throw;
  }
}

void PointToPoint::deliver(const std::shared_ptr<Posting>& receive, const Arrival& message) {
  const bool fitting = fits(*receive, message.envelope);
  if (message.envelope.form == Envelope::Form::kWhole) give_back(message.from, cost(message.envelope));
  if (!fitting) return refuse(*receive, message);
  receive->handle.source = message.from;
  if (message.own) {
    std::memcpy(receive->data, message.own->data, receive->bytes);
    finish(*message.own);
  } else if (message.envelope.form == Envelope::Form::kAnnounced) {
    return take_data(receive, message);
  } else if (!message.data.empty()) {
    std::memcpy(receive->data, message.data.data(), receive->bytes);
  }
  finish(*receive);
}

void PointToPoint::refuse(Posting& receive, const Arrival& message) {
  const Envelope& envelope = message.envelope;
  const std::string text = receive.text() + " on rank " + std::to_string(rank_) + " expects " +
                           elements(receive.bytes, receive.dtype) + ", but rank " + std::to_string(message.from) +
                           " sent " + elements(envelope.bytes, envelope.dtype);
  if (message.own) {
    finish(*message.own, std::make_exception_ptr(OperationMismatch(text)));
  } else if (message.from != rank_) {
    post(message.from,
         Writer().put(Message::kMessage).put(Word::kRefused).put(envelope.number).put(Refusal::kMismatch).put(text));
  }
  finish(receive, std::make_exception_ptr(OperationMismatch(text)));
}

void PointToPoint::take_data(const std::shared_ptr<Posting>& receive, const Arrival& message) {
  Location place;
  std::memcpy(&place, message.data.data(), sizeof(place));
  if ((place.segment != 0 || receive->bytes == 0) && copy_from(*receive, message, place)) return;
  const Tag tag = services_.next_tag();
  const bool begun = move(receive, message.from, [&] {
    return common_.transport.receive(message.from, tag, std::span<std::byte>(receive->data, receive->bytes));
  });
  if (begun) post(message.from, Writer().put(Message::kMessage).put(Word::kAsk).put(message.envelope.number).put(tag));
}

// Copies data, if there are any, from memory of the sender that this rank reaches. Returns false if the sender has
// ended its calls meanwhile, because then the data may have changed. The receive ends once this rank hears why.
bool PointToPoint::copy_from(Posting& receive, const Arrival& message, const Location& place) {
  if (receive.bytes > 0 && (!is_near(message.from) || place.device != 0))
    throw TransportError("rank " + std::to_string(message.from) +
                         " announces data outside of the memory that it offers");
  try {
    common_.transport.node_memory().copy(message.from, place, {receive.data, receive.bytes});
  } catch (const MemoryGone& error) {
    finish(receive, std::make_exception_ptr(PeerLost(receive.text() + " failed: " + error.what(), {message.from})));
    return true;
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  if (const Incoming& in = in_[message.from]; in.box && in.box->closed()) return false;
  post(message.from, Writer().put(Message::kMessage).put(Word::kTaken).put(message.envelope.number));
  finish(receive);
  return true;
}

// Gives buffer space back to the sender, which has counted this message whether or not it was buffered.
void PointToPoint::give_back(int from, std::size_t bytes) {
  Incoming& in = in_[from];
  if (from == rank_) {
    out_[from].consumed += bytes;
  } else if (in.box) {
    in.box->consume(bytes);
  } else if (in.unreported += bytes; in.unreported >= kBufferedBytes / 8) {
    post(from, Writer().put(Message::kMessage).put(Word::kConsumed).put(std::exchange(in.unreported, 0)));
  }
}

void PointToPoint::require_valid(int from, const Envelope& envelope) const {
  const bool valid = envelope.number > 0 && static_cast<int>(envelope.dtype) < kDTypeCount &&
                     envelope.form <= Envelope::kLastForm && envelope.bytes % size_of(envelope.dtype) == 0 &&
                     (envelope.form == Envelope::Form::kAnnounced || envelope.bytes <= kWholeBytes);
  if (!valid) throw TransportError("rank " + std::to_string(from) + " sent a message with a damaged envelope");
}

void PointToPoint::receive(int from, Reader& reader) {
  switch (reader.one_of(kLastWord)) {
    case Word::kEnvelope: {
      const auto envelope = reader.get<Envelope>();
      require_valid(from, envelope);
      const std::span<const std::byte> payload = reader.rest();
      if (payload.size() != envelope.payload())
        throw TransportError("rank " + std::to_string(from) + " sent a message of another size than it says");
      const std::shared_ptr<Arrival> message = begin(from, envelope);
      if (!payload.empty()) std::memcpy(message->into, payload.data(), payload.size());
      message->arrived = payload.size();
      complete(*message);
      break;
    }
    case Word::kFastBox: map_box(from, reader.get<Location>()); break;
    case Word::kAsk: {
      const auto number = reader.get<std::uint64_t>();
      give(from, number, reader.get<Tag>());
      break;
    }
    case Word::kTaken: {
      const std::shared_ptr<Posting> send = take_announced(from, reader.get<std::uint64_t>());
      if (!send)
        throw TransportError("rank " + std::to_string(from) + " has taken a message that was not announced to it");
      common_.traffic.count(common_.transport, from, send->bytes);
      finish(*send);
      break;
    }
    case Word::kRefused: take_refusal(from, reader); break;
    case Word::kConsumed: {
      Outgoing& out = out_[from];
      const auto bytes = reader.get<std::uint64_t>();
      if (bytes > out.sent - out.consumed)
        throw TransportError("rank " + std::to_string(from) + " has taken more messages than were sent to it");
      out.consumed += bytes;
      break;
    }
  }
}

void PointToPoint::map_box(int from, const Location& place) {
  Incoming& in = in_[from];
  if (from == rank_ || !is_near(from) || in.box || place.segment == 0 || place.device != 0 ||
      place.offset > place.bytes || place.bytes - place.offset < FastBox::bytes())
    throw TransportError("rank " + std::to_string(from) + " offers a fast box that cannot be one");
  try {
    in.box.emplace(common_.transport.node_memory().map(from, place));
    boxes_.push_back(from);
  } catch (const MemoryGone&) {
    // The rank has ended meanwhile, which the failure detector reports.
  }
}

bool PointToPoint::read_boxes() {
  bool moved = false;
  for (const int from : boxes_) moved |= read_box(from);
  return moved;
}

bool PointToPoint::read_box(int from) {
  Incoming& in = in_[from];
  Ring& ring = in.box->ring();
  bool moved = false;
  for (std::size_t ready = ring.ready(); ready > 0; ready = ring.ready()) {
    if (!in.arriving) {
      Envelope envelope;
      if (ready < sizeof(envelope))
        throw TransportError("rank " + std::to_string(from) + " has published a part of an envelope");
      ring.take(&envelope, sizeof(envelope));
      ready -= sizeof(envelope);
      require_valid(from, envelope);
      in.arriving = begin(from, envelope);
    }
    Arrival& message = *in.arriving;
    const std::size_t chunk = std::min(ready, message.envelope.payload() - message.arrived);
    ring.take(message.into + message.arrived, chunk);
    message.arrived += chunk;
    if (in.box->release()) common_.transport.ring(from);
    moved = true;
    if (!message.complete()) continue;
    const std::shared_ptr<Arrival> last = std::move(in.arriving);
    in.arriving.reset();
    complete(*last);
  }
  return moved;
}

}  // namespace sordino
