// All-reduce by messages, between ranks that do not share memory. Large tensors go round a ring (reduce-scatter, then
// all-gather: 2(N-1)/N of the bytes, the least possible); small ones by recursive doubling (log2 N rounds of the
// whole). Each element is folded once and then copied, or folded in a tree that is the same on all ranks: equal bits
// everywhere.
#include <bit>
#include <utility>

#include "collectives/operations.h"

namespace sordino {
namespace {

constexpr std::size_t kSmall = 16 * 1024;

// into[i] = op(lower[i], upper[i])
Until fold(Team& team, DType dtype, ReduceOp op, const std::byte* lower, const std::byte* upper, std::byte* into,
           std::size_t count) {
  const std::byte* sources[] = {lower, upper};
  std::byte* destinations[] = {into};
  return team.compute->reduce(op, dtype, sources, destinations, count, 1, 1);
}

Task ring(Team& team, DType dtype, std::byte* data, std::size_t count, ReduceOp op) {
  const std::size_t width = size_of(dtype);
  const int size = team.size(), next = (team.me + 1) % size, previous = (team.me + size - 1) % size;
  const auto part = [&](int index) {
    const auto wrapped = static_cast<std::size_t>((index % size + size) % size);
    const std::size_t begin = count * wrapped / static_cast<std::size_t>(size);
    const std::size_t end = count * (wrapped + 1) / static_cast<std::size_t>(size);
    return std::span(data + begin * width, (end - begin) * width);
  };
  const std::size_t most = (count / static_cast<std::size_t>(size) + 1) * width;
  const auto arrived = team.compute->scratch(most);
  co_await team.compute->idle();
  for (int step = 0; step < size - 1; ++step) {
    const auto own = part(team.me - step - 1);
    const std::span incoming(arrived.get(), own.size());
    co_await team.exchange(next, part(team.me - step), previous, incoming);
    co_await fold(team, dtype, op, own.data(), arrived.get(), own.data(), own.size() / width);
  }
  for (int step = 0; step < size - 1; ++step) {
    co_await team.exchange(next, part(team.me + 1 - step), previous, part(team.me - step));
  }
}

// Combines the whole vectors of all ranks in a binary tree: merge(lower, upper, into), an Until, with the lower rank's
// data first, on both partners alike. Ranks beyond the largest power of two first give theirs to a partner, and get the
// result last.
template <class Merge>
Task recursive_doubling(Team& team, std::span<std::byte> data, Merge merge) {
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(team.size()))), extra = team.size() - power;
  const auto memory = team.compute->scratch(data.size());
  co_await team.compute->idle();
  const std::span theirs(memory.get(), data.size());
  if (team.me >= power) {
    const int partner = team.me - power;
    auto sending = team.send(partner, data);
    co_await team.finished(*sending, partner);
    auto receiving = team.receive(partner, data);
    co_await team.finished(*receiving, partner);
    co_return;
  }
  if (team.me < extra) {
    auto receiving = team.receive(team.me + power, theirs);
    co_await team.finished(*receiving, team.me + power);
    co_await merge(data.data(), theirs.data(), data.data());
  }
  for (int distance = 1; distance < power; distance *= 2) {
    const int partner = team.me ^ distance;
    co_await team.exchange(partner, data, partner, theirs);
    if (team.me < partner) {
      co_await merge(data.data(), theirs.data(), data.data());
    } else {
      co_await merge(theirs.data(), data.data(), data.data());
    }
  }
  if (team.me < extra) {
    auto sending = team.send(team.me + power, data);
    co_await team.finished(*sending, team.me + power);
  }
}

// The pieces as one contiguous buffer: the output itself where that is one tensor.
class Flat {
 public:
  Flat(Team& team, Pieces& pieces) : compute_(*team.compute), pieces_(pieces) {
    if (pieces.all().size() != 1) scratch_ = compute_.scratch(pieces.bytes());
  }
  std::byte* data() { return scratch_ ? scratch_.get() : pieces_.all().front().output; }

  Task begin(double pre) {
    if (data() != pieces_.all().front().input) co_await compute_.flatten(pieces_.inputs(), data());
    if (pre != 1) co_await compute_.scale(pieces_.dtype(), data(), pieces_.count(), pre);
  }
  Task finish(double post) {
    if (post != 1) co_await compute_.scale(pieces_.dtype(), data(), pieces_.count(), post);
    if (scratch_) co_await compute_.unflatten(data(), pieces_.outputs());
  }

 private:
  Compute& compute_;
  Pieces& pieces_;
  std::shared_ptr<std::byte> scratch_;
};

// Adasum of two vectors: (1 - x·y / 2|x|²) x + (1 - x·y / 2|y|²) y. Orthogonal vectors add, equal ones average.
void adasum_merge(DType dtype, const std::byte* x, const std::byte* y, std::byte* into, std::size_t count) {
  const kernels::Dots dots = kernels::dots(dtype, x, y, count);
  const double a = dots.xx > 0 ? 1 - dots.xy / (2 * dots.xx) : 1;
  const double b = dots.yy > 0 ? 1 - dots.xy / (2 * dots.yy) : 1;
  if (into == x) {
    kernels::axpby(dtype, y, into, count, b, a);
  } else {
    kernels::axpby(dtype, x, into, count, a, b);
  }
}

}  // namespace

Task allreduce_messages(Team& team, Pieces& pieces, ReduceOp op, double pre, double post) {
  const DType dtype = pieces.dtype();
  if (dtype == DType::kFloat16 && op == ReduceOp::kSum && post < 1) {
    pre *= std::exchange(post, 1.0);  // partial sums travel as float16: dividing first keeps them in its range
  }
  Flat flat(team, pieces);
  co_await flat.begin(pre);
  if (pieces.bytes() <= kSmall || team.size() == 2) {
    const std::size_t count = pieces.count();
    co_await recursive_doubling(team, std::span(flat.data(), pieces.bytes()),
                                [=, &team](std::byte* lower, std::byte* upper, std::byte* into) {
                                  return fold(team, dtype, op, lower, upper, into, count);
                                });
  } else {
    co_await ring(team, dtype, flat.data(), pieces.count(), op);
  }
  co_await flat.finish(post);
}

Task adasum(Team& team, Pieces& pieces, double pre, double post) {
  const DType dtype = pieces.dtype();
  Flat flat(team, pieces);
  co_await flat.begin(pre);
  const std::vector<Piece>& tensors = pieces.all();
  co_await recursive_doubling(team, std::span(flat.data(), pieces.bytes()),
                              [&](std::byte* lower, std::byte* upper, std::byte* into) {
                                std::size_t at = 0;
                                for (const Piece& tensor : tensors) {
                                  adasum_merge(dtype, lower + at, upper + at, into + at, tensor.count);
                                  at += tensor.count * size_of(dtype);
                                }
                                return Until{};
                              });
  co_await flat.finish(post);
}

}  // namespace sordino
