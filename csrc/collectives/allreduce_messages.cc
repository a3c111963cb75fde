// All-reduce by messages, between ranks that do not share memory. Large tensors go round a ring (reduce-scatter, then
// all-gather: 2(N-1)/N of the bytes, the least possible), two ranks exchange the whole, which is as much; small ones go
// by recursive doubling (log2 N rounds of the whole). Each element is folded once and then copied, or folded in a tree
// that is the same on all ranks: equal bits everywhere.
//
// Large ones are cut into parts, which go in several lanes side by side: while one folds, the others have bytes on the
// link.
#include <utility>

#include "collectives/operations.h"
#include "collectives/recursive_doubling.h"

namespace sordino {
namespace {

constexpr std::size_t kSmall = 16 * 1024;

// Bytes of a message, about: long enough to keep a link busy, and so short that they are still in the cache when they
// are folded, and the memory for them is soon used again. Shorter ones where there would be too few.
constexpr std::size_t kLeastOfMessage = 256 * 1024, kMostOfMessage = 1024 * 1024, kMessages = 8;

// A part of the vector, where it goes, and memory for a message.
struct Part {
  std::byte* data;
  std::size_t count;
  Tag lane;
  std::byte* arrived;
};

// How the vector is folded: its result is `post` times what all fold.
struct Fold {
  Participants& participants;
  DType dtype;
  ReduceOp op;
  double post;

  // into[i] = post * op(lower[i], upper[i])
  Until operator()(const std::byte* lower, const std::byte* upper, std::byte* into, std::size_t count,
                   double factor = 1) const {
    const std::byte* sources[] = {lower, upper};
    std::byte* destinations[] = {into};
    return participants.compute->reduce(op, dtype, sources, destinations, count, 1, factor);
  }
};

// Two ranks.
Task swap(const Fold& fold, Part part) {
  Participants& participants = fold.participants;
  const std::span own(part.data, part.count * size_of(fold.dtype));
  const int peer = 1 - participants.me;
  co_await participants.exchange(peer, own, peer, std::span(part.arrived, own.size()), part.lane);
  const std::byte *lower = participants.me == 0 ? own.data() : part.arrived,
                  *upper = participants.me == 0 ? part.arrived : own.data();
  co_await fold(lower, upper, own.data(), part.count, fold.post);
}

Task ring(const Fold& fold, Part whole) {
  Participants& participants = fold.participants;
  const std::size_t width = size_of(fold.dtype);
  const int size = participants.size(), next = (participants.me + 1) % size,
            previous = (participants.me + size - 1) % size;
  const auto part = [&](int index) {
    const auto wrapped = static_cast<std::size_t>((index % size + size) % size);
    const std::size_t begin = whole.count * wrapped / static_cast<std::size_t>(size);
    const std::size_t end = whole.count * (wrapped + 1) / static_cast<std::size_t>(size);
    return std::span(whole.data + begin * width, (end - begin) * width);
  };
  for (int step = 0; step < size - 1; ++step) {
    const auto own = part(participants.me - step - 1);
    const std::span incoming(whole.arrived, own.size());
    co_await participants.exchange(next, part(participants.me - step), previous, incoming, whole.lane);
    co_await fold(own.data(), incoming.data(), own.data(), own.size() / width, step == size - 2 ? fold.post : 1);
  }
  for (int step = 0; step < size - 1; ++step) {
    co_await participants.exchange(next, part(participants.me + 1 - step), previous, part(participants.me - step),
                                   whole.lane);
  }
}

// Messages that a part of the vector is cut into: two ranks swap it whole.
std::size_t messages_of(const Participants& participants) {
  return participants.size() == 2 ? 1 : participants.ranks.size();
}

// Of the vector's parts of `most` elements, those of a lane, one after the other.
Task along_lane(const Fold& fold, std::byte* data, std::size_t count, std::size_t most, std::size_t lane,
                std::size_t lanes) {
  Participants& participants = fold.participants;
  const std::size_t width = size_of(fold.dtype);
  const auto arrived = participants.compute->scratch((most / messages_of(participants) + 1) * width);
  co_await participants.compute->idle();
  for (std::size_t begin = lane * most; begin < count; begin += lanes * most) {
    const Part part{data + begin * width, std::min(most, count - begin), static_cast<Tag>(lane), arrived.get()};
    if (participants.size() == 2) {  // GCC 12 destroys a task twice that is awaited out of a conditional expression
      co_await swap(fold, part);
    } else {
      co_await ring(fold, part);
    }
  }
}

Task side_by_side(const Fold& fold, std::byte* data, std::size_t count) {
  const std::size_t width = size_of(fold.dtype), messages = messages_of(fold.participants);
  const std::size_t bytes = std::clamp(count * width / messages / kMessages, kLeastOfMessage, kMostOfMessage);
  const std::size_t most = bytes / width * messages;
  const std::size_t lanes = std::min((count + most - 1) / most, std::size_t{1} << kTagLaneBits);
  std::vector<Task> tasks;
  for (std::size_t lane = 0; lane < lanes; ++lane) tasks.push_back(along_lane(fold, data, count, most, lane, lanes));
  co_await together(std::move(tasks));
}

}  // namespace

Task allreduce_messages(Participants& participants, Pieces& pieces, ReduceOp op, double pre, double post) {
  const DType dtype = pieces.dtype();
  if (dtype == DType::kFloat16 && op == ReduceOp::kSum && post < 1) {
    pre *= std::exchange(post, 1.0);  // partial sums travel as float16: dividing first keeps them in its range
  }
  Flat flat(participants, pieces);
  co_await flat.begin(pre);
  const Fold fold{participants, dtype, op, post};
  if (pieces.bytes() <= kSmall) {
    const std::size_t count = pieces.count();
    co_await recursive_doubling(
        participants, std::span(flat.data(), pieces.bytes()),
        [=, &fold](std::byte* lower, std::byte* upper, std::byte* into) { return fold(lower, upper, into, count); });
    co_await flat.finish(post);
  } else {
    co_await side_by_side(fold, flat.data(), pieces.count());
    co_await flat.finish(1);
  }
}

}  // namespace sordino
