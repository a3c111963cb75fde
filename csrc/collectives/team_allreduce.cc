#include "collectives/team_allreduce.h"

#include <algorithm>

#include "collectives/recursive_doubling.h"

namespace sordino {
namespace {

// Approximate bytes of a message: enough to keep a link busy, and few enough to be folded in cache. Messages are
// shorter than kMostOfMessage if there would be fewer than kMessages parts, and shorter than kLeastOfMessage (at least
// kLeastOfAny) if parts would exceed kMostOfPart.
constexpr std::size_t kLeastOfMessage = 256 * 1024, kMostOfMessage = 1024 * 1024, kMessages = 8;
constexpr std::size_t kMostOfPart = std::size_t{4} << 20, kLeastOfAny = 64 * 1024;

// Number of messages that a team of `size` members cuts its share of a part into.
std::size_t messages_of(int size) { return size == 2 ? 1 : static_cast<std::size_t>(size); }

}  // namespace

TeamAllreduce::TeamAllreduce(Team team, DType dtype, ReduceOp op, double post, bool small)
    : team_(std::move(team)), dtype_(dtype), op_(op), post_(post), small_(small), width_(size_of(dtype)) {}

TeamAllreduce::Cut TeamAllreduce::cut(std::size_t count, DType dtype, int size, int teams) {
  const std::size_t messages = messages_of(size) * static_cast<std::size_t>(teams), width = size_of(dtype);
  const std::size_t wanted = std::clamp(count * width / messages / kMessages, kLeastOfMessage, kMostOfMessage);
  const std::size_t bytes = std::max(std::min(wanted * messages, kMostOfPart), kLeastOfAny * messages);
  const std::size_t most = bytes / width;
  return {most, std::min((count + most - 1) / most, std::size_t{1} << kTagLaneBits)};
}

Until TeamAllreduce::fold(const std::byte* lower, const std::byte* upper, std::byte* into, std::size_t count,
                          double factor) const {
  const std::byte* sources[] = {lower, upper};
  return team_.all.compute->reduce(op_, dtype_, sources, {&into, 1}, count, 1, factor);
}

Task TeamAllreduce::swap(std::byte* data, std::size_t count, std::byte* received, Tag lane) const {
  const std::span own(data, count * width_);
  co_await team_.exchange(1 - team_.me, own, 1 - team_.me, std::span(received, own.size()), lane);
  co_await fold(team_.me == 0 ? data : received, team_.me == 0 ? received : data, data, count, post_);
}

Task TeamAllreduce::ring(std::byte* data, std::size_t count, std::byte* received, Tag lane, Final final) const {
  const int size = team_.size(), me = team_.me, next = (me + 1) % size, previous = (me + size - 1) % size;
  const auto part = [&](int index) {
    const auto place = static_cast<std::size_t>(index);
    const std::size_t begin = count * place / static_cast<std::size_t>(size);
    const std::size_t end = count * (place + 1) / static_cast<std::size_t>(size);
    return std::span(data + begin * width_, (end - begin) * width_);
  };
  for (int step = 0; step < size - 1; ++step) {
    const auto [give, take] = topology::ring_step(size, me, step);
    const auto own = part(take);
    co_await team_.exchange(next, part(give), previous, std::span(received, own.size()), lane);
    co_await fold(own.data(), received, own.data(), own.size() / width_, step == size - 2 ? post_ : 1);
  }
  if (final) final(part(next).data(), part(next).size());
  for (int step = 0; step < size - 1; ++step) {
    const auto [give, take] = topology::ring_step(size, next, step);
    co_await team_.exchange(next, part(give), previous, part(take), lane);
    if (final) final(part(take).data(), part(take).size());
  }
}

std::size_t TeamAllreduce::room(std::size_t count) const {
  return (small_ ? count : count / messages_of(team_.size()) + 1) * width_;
}

Task TeamAllreduce::run(std::byte* data, std::size_t count, std::byte* received, Tag lane, Final final) const {
  const std::size_t bytes = count * width_;
  if (count == 0) co_return;
  if (small_) {
    co_await recursive_doubling(
        team_, std::span(data, bytes), received, lane,
        [this, count](std::byte* lower, std::byte* upper, std::byte* into) { return fold(lower, upper, into, count); });
    if (post_ != 1) co_await team_.all.compute->scale(dtype_, data, count, post_);
  } else if (team_.size() > 2) {
    co_await ring(data, count, received, lane, std::move(final));
    co_return;
  } else {
    co_await swap(data, count, received, lane);
  }
  if (final) final(data, bytes);
}

}  // namespace sordino
