// All-reduce by messages, between ranks that do not share memory. Large tensors go round a ring (reduce-scatter, then
// all-gather: 2(N-1)/N of the bytes, the least possible); small ones by recursive doubling (log2 N rounds of the
// whole). Each element is folded once and then copied, or folded in a tree that is the same on all ranks: equal bits
// everywhere.
#include <utility>

#include "collectives/operations.h"
#include "collectives/recursive_doubling.h"

namespace sordino {
namespace {

constexpr std::size_t kSmall = 16 * 1024;

// into[i] = op(lower[i], upper[i])
Until fold(Participants& participants, DType dtype, ReduceOp op, const std::byte* lower, const std::byte* upper,
           std::byte* into, std::size_t count) {
  const std::byte* sources[] = {lower, upper};
  std::byte* destinations[] = {into};
  return participants.compute->reduce(op, dtype, sources, destinations, count, 1, 1);
}

Task ring(Participants& participants, DType dtype, std::byte* data, std::size_t count, ReduceOp op) {
  const std::size_t width = size_of(dtype);
  const int size = participants.size(), next = (participants.me + 1) % size,
            previous = (participants.me + size - 1) % size;
  const auto part = [&](int index) {
    const auto wrapped = static_cast<std::size_t>((index % size + size) % size);
    const std::size_t begin = count * wrapped / static_cast<std::size_t>(size);
    const std::size_t end = count * (wrapped + 1) / static_cast<std::size_t>(size);
    return std::span(data + begin * width, (end - begin) * width);
  };
  const std::size_t most = (count / static_cast<std::size_t>(size) + 1) * width;
  const auto arrived = participants.compute->scratch(most);
  co_await participants.compute->idle();
  for (int step = 0; step < size - 1; ++step) {
    const auto own = part(participants.me - step - 1);
    const std::span incoming(arrived.get(), own.size());
    co_await participants.exchange(next, part(participants.me - step), previous, incoming);
    co_await fold(participants, dtype, op, own.data(), arrived.get(), own.data(), own.size() / width);
  }
  for (int step = 0; step < size - 1; ++step) {
    co_await participants.exchange(next, part(participants.me + 1 - step), previous, part(participants.me - step));
  }
}

}  // namespace

Task allreduce_messages(Participants& participants, Pieces& pieces, ReduceOp op, double pre, double post) {
  const DType dtype = pieces.dtype();
  if (dtype == DType::kFloat16 && op == ReduceOp::kSum && post < 1) {
    pre *= std::exchange(post, 1.0);  // partial sums travel as float16: dividing first keeps them in its range
  }
  Flat flat(participants, pieces);
  co_await flat.begin(pre);
  if (pieces.bytes() <= kSmall || participants.size() == 2) {
    const std::size_t count = pieces.count();
    co_await recursive_doubling(participants, std::span(flat.data(), pieces.bytes()),
                                [=, &participants](std::byte* lower, std::byte* upper, std::byte* into) {
                                  return fold(participants, dtype, op, lower, upper, into, count);
                                });
  } else {
    co_await ring(participants, dtype, flat.data(), pieces.count(), op);
  }
  co_await flat.finish(post);
}

}  // namespace sordino
