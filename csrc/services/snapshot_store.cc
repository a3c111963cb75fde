#include "services/snapshot_store.h"

#include "base/keep.h"
#include "kernels/kernels.h"

namespace sordino {

SnapshotStore::SnapshotStore(ServiceContext& context, int number, std::shared_ptr<const Layout> layout,
                             std::shared_ptr<Mailbox> mailbox)
    : context_(context),
      number_(number),
      layout_(std::move(layout)),
      mailbox_(std::move(mailbox)),
      snapshots_(context.transport().node_memory(), layout_->bytes()),
      location_(context.transport().shares_memory()
                    ? context.transport().node_memory().locate(snapshots_.segment()->data, snapshots_.segment()->bytes)
                    : Location{}),
      locations_(static_cast<std::size_t>(context.transport().size())),
      closed_(static_cast<std::size_t>(context.transport().size())) {}

SnapshotStore::~SnapshotStore() {
  for (Receiving& receiving : abandoned_) leak_intentionally(std::move(receiving.pull->values));
  if (!sendings_.empty()) leak_intentionally(snapshots_.segment());
}

void SnapshotStore::connect(int rank, const Location& location) {
  locations_.at(static_cast<std::size_t>(rank)) = location;
}

bool SnapshotStore::publish(const std::byte* source, std::uint64_t steps) {
  const std::uint64_t version = snapshots_.publish(source, steps);
  if (version == 0) {
    unpublished_.fetch_add(1);
    return false;
  }
  if (version == 1) {
    published_ = true;
    context_.wake();
  }
  return true;
}

std::shared_ptr<Pull> SnapshotStore::pull(int peer, Time start) {
  auto made = std::make_shared<Pull>();
  made->peer = peer;
  made->start = start;
  {
    std::lock_guard lock(mutex_);
    made->number = ++next_number_;
    made->values = take_memory();
    if (ended_) {
      made->failure = "the world has ended";
      made->state = Pull::State::kFailed;
      return made;
    }
    armed_.push_back(made);
  }
  context_.wake();
  return made;
}

void SnapshotStore::cancel(const std::shared_ptr<Pull>& pull) {
  {
    std::lock_guard lock(mutex_);
    cancelled_.push_back(pull);
  }
  context_.wake();
}

void SnapshotStore::average(Pull& pull, std::byte* values) {
  if (pull.state.load(std::memory_order_acquire) != Pull::State::kDone || !pull.values)
    throw UsageError("this pull has no values to average: it is not done, or its values have been used");
  for (const LayoutSegment& run : layout_->segments()) {
    if (run.bytes == 0) continue;
    std::byte* mine = values + run.offset;
    const std::byte* sources[] = {mine, pull.values.get() + run.offset};
    std::byte* destinations[] = {mine};
    kernels::reduce(ReduceOp::kSum, run.dtype, sources, destinations, run.bytes / size_of(run.dtype), 1, 0.5);
  }
  discard(pull);
}

void SnapshotStore::discard(Pull& pull) {
  std::lock_guard lock(mutex_);
  const auto state = pull.state.load(std::memory_order_acquire);
  if (pull.values && (state == Pull::State::kDone || state == Pull::State::kFailed)) put_memory(std::move(pull.values));
}

std::unique_ptr<std::byte[]> SnapshotStore::take_memory() {
  if (spare_.empty()) return std::make_unique_for_overwrite<std::byte[]>(layout_->bytes());
  auto memory = std::move(spare_.back());
  spare_.pop_back();
  return memory;
}

void SnapshotStore::put_memory(std::unique_ptr<std::byte[]> memory) {
  constexpr std::size_t kSpares = 2;  // one pull under way, and one whose values are in use
  if (spare_.size() < kSpares) spare_.push_back(std::move(memory));
}

}  // namespace sordino
