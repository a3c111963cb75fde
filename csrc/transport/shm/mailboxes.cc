#include "transport/shm/mailboxes.h"

#include <algorithm>

namespace sordino::shm {
namespace {

constexpr std::size_t kCapacity = 64 * 1024 - 128;  // bytes of a ring
// A control message takes some kilobytes, or some megabytes with thousands of tensors. A longer one is an error:
// waiting for its end would take forever, and block all later messages.
constexpr std::size_t kMostBytes = std::size_t{1} << 28;

std::string oversized(std::size_t size) {
  return "a control message of " + std::to_string(size) + " bytes, but the limit is " + std::to_string(kMostBytes);
}

// On destruction, drops the consumed bytes of a stream, even if the sink has thrown: a message is delivered only once.
struct Taken {
  explicit Taken(Bytes& of) : stream(of) {}
  ~Taken() { stream.erase(stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(bytes)); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  Bytes& stream;
  std::size_t bytes = 0;
};

}  // namespace

std::size_t Mailboxes::bytes_for(std::size_t ranks) { return sizeof(Doorbell) + ranks * Ring::bytes_for(kCapacity); }

Mailboxes::Mailboxes(std::vector<int> here, int self, std::vector<std::byte*> boxes)
    : here_(std::move(here)), self_(self), outgoing_(here_.size()), incoming_(here_.size()) {
  const auto ring = [&](std::size_t owner, std::size_t writer) {
    return Ring(boxes[owner] + sizeof(Doorbell) + writer * Ring::bytes_for(kCapacity), kCapacity);
  };
  for (std::size_t index = 0; index < here_.size(); ++index) {
    bells_.push_back(reinterpret_cast<Doorbell*>(boxes[index]));
    to_.push_back(ring(index, static_cast<std::size_t>(self)));
    from_.push_back(ring(static_cast<std::size_t>(self), index));
  }
}

void Mailboxes::refuse(int from, std::span<const std::byte>) {
  throw TransportError("rank " + std::to_string(from) + " sent a message that has no receiver: its mailbox is damaged");
}

void Mailboxes::add(int to, const Bytes& message, std::uint32_t flag) {
  if (message.size() > kMostBytes)
    throw TransportError("rank " + std::to_string(here_[to]) + " is to receive " + oversized(message.size()));
  Bytes& queue = outgoing_[to].bytes;
  const auto size = static_cast<std::uint32_t>(message.size()) | flag;
  const auto* head = reinterpret_cast<const std::byte*>(&size);
  queue.insert(queue.end(), head, head + sizeof(size));
  queue.insert(queue.end(), message.begin(), message.end());
  flush(to);
}

bool Mailboxes::flush(int to) {
  Outgoing& out = outgoing_[to];
  if (out.bytes.empty()) return false;
  const std::size_t bytes = std::min(to_[to].room(), out.bytes.size() - out.sent);
  if (bytes == 0) return false;
  to_[to].put(out.bytes.data() + out.sent, bytes);
  to_[to].publish();
  out.sent += bytes;
  if (out.sent == out.bytes.size()) {
    out.bytes.clear();
    out.sent = 0;
  }
  bells_[to]->ring();
  return true;
}

bool Mailboxes::poll(const Sink& sink, const Sink& inner) {
  bool moved = false;
  for (std::size_t writer = 0; writer < here_.size(); ++writer) {
    moved |= flush(static_cast<int>(writer));
    moved |= read(writer);
    if (!incoming_[writer].empty()) moved |= deliver(writer, sink, inner);  // also messages behind a refused one
  }
  return moved;
}

bool Mailboxes::read(std::size_t writer) {
  Ring& ring = from_[writer];
  const std::size_t bytes = ring.ready();
  if (bytes == 0) return false;
  Bytes& stream = incoming_[writer];
  const std::size_t before = stream.size();
  stream.resize(before + bytes);
  ring.take(stream.data() + before, bytes);
  ring.release();
  if (bytes > kCapacity / 2) bells_[writer]->ring();  // its writer may be waiting for space
  return true;
}

bool Mailboxes::deliver(std::size_t writer, const Sink& sink, const Sink& inner) {
  Taken taken(incoming_[writer]);
  const std::span<const std::byte> stream(incoming_[writer]);
  std::uint32_t length = 0;
  while (stream.size() - taken.bytes >= sizeof(length)) {
    std::memcpy(&length, stream.data() + taken.bytes, sizeof(length));
    const std::size_t size = length & ~kInner;
    if (size > kMostBytes)
      throw TransportError("rank " + std::to_string(here_[writer]) + " announces " + oversized(size) +
                           ": its mailbox is damaged");
    if (stream.size() - taken.bytes - sizeof(length) < size) break;
    const auto message = stream.subspan(taken.bytes + sizeof(length), size);
    taken.bytes += sizeof(length) + size;
    (length & kInner ? inner : sink)(here_[writer], message);
  }
  return taken.bytes > 0;
}

bool Mailboxes::idle() const {
  return std::all_of(outgoing_.begin(), outgoing_.end(), [](const Outgoing& out) { return out.bytes.empty(); });
}

}  // namespace sordino::shm
