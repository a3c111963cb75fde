#include "collectives/pair_averaging.h"

#include <algorithm>
#include <cstring>

#include "collectives/world.h"
#include "kernels/kernels.h"

namespace sordino {

PairAveraging::PairAveraging(World& world, int number, std::shared_ptr<const Layout> layout, std::byte* values,
                             std::shared_ptr<Letters> letters)
    : world_(world), number_(number), layout_(std::move(layout)), values_(values), letters_(std::move(letters)) {}

PairAveraging::~PairAveraging() {
  for (Averaging& old : abandoned_) {
    static_cast<void>(old.memory.out.release());
    static_cast<void>(old.memory.in.release());
  }
}

void PairAveraging::begin(int peer, std::uint64_t number) {
  {
    std::lock_guard lock(mutex_);
    if (next_) throw UsageError("an averaging has yet to begin, so another cannot");
    next_ = std::make_unique<Averaging>(Averaging{peer, number});
  }
  world_.wake();
}

void PairAveraging::cancel() {
  {
    std::lock_guard lock(mutex_);
    next_ = nullptr;
    cancelled_ = true;
  }
  world_.wake();
}

void PairAveraging::unlock() {
  ++changes_;
  values_mutex_.unlock();
}

void PairAveraging::receive(int from, Reader& reader) {
  const auto number = reader.get<std::uint64_t>();
  Invitation& said = invitations_[from];
  if (said.number != number) said = {number, {}};
  if (reader.empty()) return;
  const auto tag = reader.get<Tag>();
  if (tag >= (Tag{1} << kTagBits)) throw TransportError("an averaging names a tag that there is not");
  said.tag = tag;
}

const PairAveraging::Invitation* PairAveraging::invitation(const Averaging& averaging) const {
  const auto found = invitations_.find(averaging.peer);
  return found != invitations_.end() && found->second.number == averaging.number ? &found->second : nullptr;
}

// Copies the values, and tells the peer where to send its own. False while a step holds them.
bool PairAveraging::start(Averaging& averaging, Time now) {
  std::unique_lock free(values_mutex_, std::try_to_lock);
  if (!free) return false;
  const std::size_t bytes = layout_->bytes();
  averaging.memory = std::move(spare_);
  if (!averaging.memory.out) {
    averaging.memory = {std::make_unique_for_overwrite<std::byte[]>(bytes),
                        std::make_unique_for_overwrite<std::byte[]>(bytes)};
  }
  std::memcpy(averaging.memory.out.get(), values_, bytes);
  averaging.changes = changes_;
  averaging.copied = true;
  averaging.since = now;
  const Tag tag = world_.next_tag();
  averaging.receiving = world_.data().receive(averaging.peer, tag, std::span(averaging.memory.in.get(), bytes));
  world_.post_to_service(number_, averaging.peer, Writer().put(averaging.number).put(tag).take());
  return true;
}

void PairAveraging::send(Averaging& averaging, Tag tag) {
  const std::span<const std::byte> out(averaging.memory.out.get(), layout_->bytes());
  world_.count_sent(averaging.peer, out.size());
  averaging.sending = world_.data().send(averaging.peer, tag, out);
}

// Adds half the difference. False while a step holds the values.
bool PairAveraging::apply(Averaging& averaging) {
  std::unique_lock free(values_mutex_, std::try_to_lock);
  if (!free) return false;
  const bool untouched = averaging.changes == changes_;
  for (const LayoutSegment& run : layout_->segments()) {
    if (run.bytes == 0) continue;
    std::byte* mine = values_ + run.offset;
    const std::byte* out = averaging.memory.out.get() + run.offset;
    const std::byte* in = averaging.memory.in.get() + run.offset;
    const std::size_t count = run.bytes / size_of(run.dtype);
    if (untouched) {  // the very mean, as on the other side
      const std::byte* sources[] = {out, in};
      std::byte* destinations[] = {mine};
      kernels::reduce(ReduceOp::kSum, run.dtype, sources, destinations, count, 1, 0.5);
    } else {
      kernels::axpby(run.dtype, in, mine, count, 0.5, 1.0);
      kernels::axpby(run.dtype, out, mine, count, -0.5, 1.0);
    }
  }
  ++changes_;
  return true;
}

bool PairAveraging::advance(Time now) {
  bool cancelled = false;
  {
    std::lock_guard lock(mutex_);
    cancelled = std::exchange(cancelled_, false);
  }
  if (cancelled && current_) leave({});
  if (!current_) {
    std::lock_guard lock(mutex_);
    current_ = std::move(next_);
  }
  std::erase_if(abandoned_, [](Averaging& old) {
    try {
      return (!old.sending || old.sending->test()) && (!old.receiving || old.receiving->test());
    } catch (const PeerLost&) {
      return false;  // what MPI does with the memory then, nobody knows: it stays
    }
  });
  if (!current_) return cancelled;
  Averaging& averaging = *current_;
  try {
    if (world_.has_left(averaging.peer)) {
      leave("rank " + std::to_string(averaging.peer) + " is gone");
      return true;
    }
    if (!averaging.told) {
      world_.post_to_service(number_, averaging.peer, Writer().put(averaging.number).take());
      averaging.told = true;
    }
    const Invitation* said = invitation(averaging);
    if (!said) return false;
    if (!averaging.copied && !start(averaging, now)) return false;
    if (!averaging.sending) {
      if (!said->tag) return false;
      send(averaging, *said->tag);
    }
    const bool sent = averaging.sending->test(), received = averaging.receiving->test();
    if (!sent || !received || !apply(averaging)) return false;
  } catch (const PeerLost& error) {
    leave(error.what());
    return true;
  }
  if (world_.trace().on()) {
    world_.trace().span("average with " + std::to_string(averaging.peer), "AVERAGE", averaging.since, now,
                        layout_->bytes());
  }
  spare_ = std::move(averaging.memory);
  const int peer = averaging.peer;
  const std::uint64_t number = averaging.number;
  current_ = nullptr;
  letters_->push({Letters::Event::Kind::kDone, peer, {}, number});
  return true;
}

void PairAveraging::leave(const std::string& why) {
  const int peer = current_->peer;
  const std::uint64_t number = current_->number;
  if (current_->copied) abandoned_.push_back(std::move(*current_));
  current_ = nullptr;
  if (!why.empty()) letters_->push({Letters::Event::Kind::kDone, peer, why, number});
}

void PairAveraging::lost(int rank) {
  invitations_.erase(rank);
  if (current_ && current_->peer == rank) leave("rank " + std::to_string(rank) + " is gone");
}

void PairAveraging::end(std::exception_ptr) {
  if (current_) leave("the world has ended");
}

}  // namespace sordino
