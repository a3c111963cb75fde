#include "services/pair_averaging.h"

#include <cstring>
#include <utility>

#include "base/keep.h"
#include "kernels/kernels.h"

namespace sordino {
namespace {

std::string text_of(const std::exception_ptr& why) {
  try {
    std::rethrow_exception(why);
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

PairAveraging::PairAveraging(ServiceContext& context, int number, std::shared_ptr<const Layout> layout,
                             std::byte* values, std::shared_ptr<Mailbox> mailbox)
    : context_(context), number_(number), layout_(std::move(layout)), values_(values), mailbox_(std::move(mailbox)) {}

PairAveraging::~PairAveraging() {
  for (Averaging& old : abandoned_) {
    leak_intentionally(std::move(old.memory.out));
    leak_intentionally(std::move(old.memory.in));
  }
}

void PairAveraging::begin(int peer, std::uint64_t number) {
  {
    std::lock_guard lock(mutex_);
    if (ended_) std::rethrow_exception(ended_);
    if (next_)
      throw UsageError("an averaging that was requested earlier has not begun yet, so another cannot be requested");
    next_ = std::make_unique<Averaging>(Averaging{peer, number});
  }
  context_.wake();
}

void PairAveraging::cancel() {
  {
    std::lock_guard lock(mutex_);
    next_ = nullptr;
    cancelled_ = true;
  }
  context_.wake();
}

void PairAveraging::unlock() {
  ++changes_;
  values_mutex_.unlock();
  if (refused_.exchange(false)) context_.wake();
}

// Returns the lock on the values, or no lock if a step holds it. The end of that step then wakes this thread, unless
// it came before refused_ was set. The second try is for that case.
std::unique_lock<std::mutex> PairAveraging::try_values() {
  std::unique_lock free(values_mutex_, std::try_to_lock);
  if (free) return free;
  refused_.exchange(true);  // not a store: it has to synchronize with the exchange in unlock()
  return std::unique_lock(values_mutex_, std::try_to_lock);
}

void PairAveraging::receive(int from, Reader& reader) {
  const auto number = reader.get<std::uint64_t>();
  Invitation& said = invitations_[from];
  if (said.number != number) said = {number, {}};
  if (reader.empty()) return;
  const auto tag = reader.get<Tag>();
  if (tag >= (Tag{1} << kTagBits)) throw TransportError("an averaging names a tag that is out of range");
  said.tag = tag;
}

// Copies and sends the values, as soon as the peer is ready for each. Returns true once this side has begun to send.
// Messages that the peer sends after that concern later averagings.
bool PairAveraging::join(Averaging& averaging, Time now) {
  const auto said = invitations_.find(averaging.peer);
  if (said == invitations_.end() || said->second.number != averaging.number) return false;
  if (!averaging.copied && !start(averaging, now)) return false;
  if (!said->second.tag) return false;
  send(averaging, *said->second.tag);
  return true;
}

// Copies the values, and tells the peer the tag to send to. Returns false if a step holds the lock on the values.
bool PairAveraging::start(Averaging& averaging, Time now) {
  const auto free = try_values();
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
  // Tags repeat, and the transport gives data to the oldest receive with their tag. So skip tags of abandoned receives.
  const auto taken = [this](Tag tag) {
    return std::ranges::any_of(abandoned_, [tag](const Averaging& old) { return old.tag == tag; });
  };
  Tag tag = context_.next_tag();
  while (taken(tag)) tag = context_.next_tag();
  averaging.tag = tag;
  averaging.receiving = context_.transport().receive(averaging.peer, tag, std::span(averaging.memory.in.get(), bytes));
  context_.post(number_, averaging.peer, Writer().put(averaging.number).put(tag).take());
  return true;
}

void PairAveraging::send(Averaging& averaging, Tag tag) {
  const std::span<const std::byte> out(averaging.memory.out.get(), layout_->bytes());
  context_.count_sent(averaging.peer, out.size());
  averaging.sending = context_.transport().send(averaging.peer, tag, out);
}

// Returns whether all data are sent and received. From then on neither side needs the other.
bool PairAveraging::exchanged(Averaging& averaging) {
  if (!averaging.sending) return false;
  const bool sent = averaging.sending->test(), received = averaging.receiving->test();
  return sent && received;
}

// Adds half the difference of the two copies to the values. Returns false if a step holds the lock on the values.
bool PairAveraging::apply(Averaging& averaging) {
  const auto free = try_values();
  if (!free) return false;
  const bool untouched = averaging.changes == changes_;
  for (const LayoutSegment& run : layout_->segments()) {
    if (run.bytes == 0) continue;
    std::byte* mine = values_ + run.offset;
    const std::byte* out = averaging.memory.out.get() + run.offset;
    const std::byte* in = averaging.memory.in.get() + run.offset;
    const std::size_t count = run.bytes / size_of(run.dtype);
    if (untouched) {  // the values still equal `out`, so they become the mean
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
    if (current_) current_->deserted = context_.has_left(current_->peer) || closed_.contains(current_->peer);
  }
  std::erase_if(abandoned_, [](Averaging& old) {
    try {
      return (!old.sending || old.sending->test()) && (!old.receiving || old.receiving->test());
    } catch (const PeerLost&) {
      return false;  // MPI may still use the memory, so it is kept
    }
  });
  if (!current_) return cancelled;
  Averaging& averaging = *current_;
  try {
    // If the exchange is complete, the peer may have averaged before it left. So this side must average, too.
    if (averaging.deserted && !exchanged(averaging)) {
      leave("rank " + std::to_string(averaging.peer) + " is gone");
      return true;
    }
    if (!averaging.told) {
      context_.post(number_, averaging.peer, Writer().put(averaging.number).take());
      averaging.told = true;
    }
    if (!averaging.sending && !join(averaging, now)) return false;
    if (!exchanged(averaging) || !apply(averaging)) return false;
  } catch (const PeerLost& error) {
    leave(error.what());
    return true;
  }
  if (context_.trace().on()) {
    context_.trace().span("average with " + std::to_string(averaging.peer), "AVERAGE", averaging.since, now,
                          layout_->bytes());
  }
  context_.ledger().done_beside(Ledger::What::kAverage, averaging.since, now, averaging.peer, layout_->bytes());
  spare_ = std::move(averaging.memory);
  const std::unique_ptr<Averaging> over = std::move(current_);
  push_done(*over, {});
  return true;
}

void PairAveraging::push_done(const Averaging& averaging, const std::string& why) {
  mailbox_->push({Mailbox::Event::Kind::kDone, averaging.peer, why, averaging.number});
}

// Gives up the current averaging, and reports the reason `why`. Reports nothing if `why` is empty (cancelled).
void PairAveraging::leave(const std::string& why) {
  const std::unique_ptr<Averaging> left = std::move(current_);
  if (left->copied) abandoned_.push_back(std::move(*left));
  if (!why.empty()) push_done(*left, why);
}

void PairAveraging::lost(int rank) {
  invitations_.erase(rank);
  closed_.insert(rank);
  if (current_ && current_->peer == rank) current_->deserted = true;
}

void PairAveraging::end(std::exception_ptr why) {
  std::unique_ptr<Averaging> next;
  {
    std::lock_guard lock(mutex_);
    ended_ = why;
    next = std::move(next_);
  }
  if (current_) leave(text_of(why));
  if (next) push_done(*next, text_of(why));
}

}  // namespace sordino
