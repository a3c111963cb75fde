// The part of a snapshot store on the polling thread: it begins pulls, answers requests and advances transfers.
#include <algorithm>
#include <utility>

#include "services/snapshot_store.h"

namespace sordino {
namespace {

using std::chrono::steady_clock;

enum class Word : std::uint8_t { kAsk, kGive };
inline constexpr Word kLastWord = Word::kGive;

double seconds(Time from, Time to) { return std::chrono::duration<double>(to - from).count(); }

}  // namespace

void SnapshotStore::begin(const std::shared_ptr<Pull>& pull, Time now) {
  pull->begun = now;
  pull->state = Pull::State::kUnderWay;
  const Location& location = locations_[static_cast<std::size_t>(pull->peer)];
  if (context_.has_left(pull->peer) || closed_[static_cast<std::size_t>(pull->peer)]) {
    finish(pull, Pull::State::kFailed, "rank " + std::to_string(pull->peer) + " is gone");
  } else if (location.segment != 0) {
    try {
      if (copy_from(context_.transport().node_memory().map(pull->peer, location), *pull)) {
        context_.count_sent(pull->peer, layout_->bytes());
        finish(pull, Pull::State::kDone);
      } else {
        receivings_.push_back({pull, nullptr});  // advance_receivings() tries again
      }
    } catch (const MemoryGone& error) {
      finish(pull, Pull::State::kFailed, error.what());
    }
  } else {
    try {
      const Tag tag = context_.next_tag();
      auto transfer = context_.transport().receive(pull->peer, tag, std::span(pull->values.get(), layout_->bytes()));
      receivings_.push_back({pull, std::move(transfer)});
      context_.post(number_, pull->peer, Writer().put(Word::kAsk).put(pull->number).put(tag).take());
    } catch (const PeerLost& error) {
      finish(pull, Pull::State::kFailed, error.what());
    }
  }
}

bool SnapshotStore::copy_from(std::byte* base, Pull& pull) const {
  const auto facts = snapshots_.copy_newest(base, pull.values.get());
  if (!facts) return false;
  pull.version = facts->version;
  pull.steps = facts->steps;
  pull.age = seconds(facts->published, pull.begun);
  return true;
}

void SnapshotStore::answer(const Request& request, Time now) {
  const int place = snapshots_.pin_newest();
  if (place < 0) {
    early_.push_back(request);
    return;
  }
  std::unique_ptr<Transfer> transfer;
  try {
    transfer =
        context_.transport().send(request.from, request.tag, std::span(snapshots_.data(place), layout_->bytes()));
  } catch (const PeerLost&) {
    snapshots_.unpin(place);
    return;  // the failure detector will report the loss
  }
  sendings_.push_back({place, std::move(transfer)});
  const Snapshots::Facts facts = snapshots_.facts(place);
  context_.post(number_, request.from,
                Writer()
                    .put(Word::kGive)
                    .put(request.number)
                    .put(facts.version)
                    .put(facts.steps)
                    .put(seconds(facts.published, now))
                    .take());
  context_.count_sent(request.from, layout_->bytes());
}

void SnapshotStore::finish(const std::shared_ptr<Pull>& pull, Pull::State state, const std::string& failure) {
  pull->ended = steady_clock::now();
  pull->failure = failure;
  if (state == Pull::State::kDone && context_.trace().on()) {
    context_.trace().span("pull from " + std::to_string(pull->peer), "PULL", pull->begun, pull->ended,
                          layout_->bytes());
  }
  if (state == Pull::State::kDone) {
    context_.ledger().done_beside(Ledger::What::kPull, pull->begun, pull->ended, pull->peer, layout_->bytes());
  }
  pull->state.store(state, std::memory_order_release);
  mailbox_->push({Mailbox::Event::Kind::kDone, pull->peer, {}, pull->number});
}

void SnapshotStore::receive(int from, Reader& reader) {
  const auto word = reader.one_of(kLastWord);
  const auto number = reader.get<std::uint64_t>();
  if (word == Word::kAsk) {
    const auto tag = reader.get<Tag>();
    if (tag >= (Tag{1} << kTagBits)) throw TransportError("a request names a tag that is out of range");
    answer({from, number, tag}, steady_clock::now());
    return;
  }
  for (Receiving& receiving : receivings_) {
    Pull& pull = *receiving.pull;
    if (pull.number != number || pull.peer != from) continue;
    pull.version = reader.get<std::uint64_t>();
    pull.steps = reader.get<std::uint64_t>();
    pull.age = reader.get<double>();
    receiving.told = true;
  }
}

bool SnapshotStore::advance(Time now) {
  bool moved = advance_armed(now);
  if (published_.exchange(false)) {
    for (const Request& request : std::exchange(early_, {})) answer(request, now);
  }
  moved |= advance_sendings();
  moved |= advance_receivings();
  std::erase_if(abandoned_, [](Receiving& receiving) {
    try {
      return receiving.transfer->test();
    } catch (const PeerLost&) {
      return false;  // MPI may still use the memory, so it is kept
    }
  });
  return moved;
}

// Begins pulls whose time has come, and ends cancelled ones.
bool SnapshotStore::advance_armed(Time now) {
  std::vector<std::shared_ptr<Pull>> due, cancelled;
  {
    std::lock_guard lock(mutex_);
    cancelled.swap(cancelled_);
    for (auto pull = armed_.begin(); pull != armed_.end();) {
      const bool gone = std::find(cancelled.begin(), cancelled.end(), *pull) != cancelled.end();
      if (gone) {
        (*pull)->state.store(Pull::State::kFailed, std::memory_order_release);
      } else if ((*pull)->start <= now) {
        due.push_back(*pull);
      } else {
        ++pull;
        continue;
      }
      pull = armed_.erase(pull);
    }
  }
  for (const auto& pull : cancelled) {
    const auto found = std::find_if(receivings_.begin(), receivings_.end(),
                                    [&](const Receiving& receiving) { return receiving.pull == pull; });
    if (found != receivings_.end()) abandon(found, "it was cancelled");
  }
  for (const auto& pull : due) begin(pull, now);
  return !due.empty();
}

bool SnapshotStore::advance_sendings() {
  bool moved = false;
  for (auto sending = sendings_.begin(); sending != sendings_.end();) {
    bool over = true;
    try {
      over = sending->transfer->test();
    } catch (const PeerLost&) {
      // The failure detector will report the loss.
    }
    if (!over) {
      ++sending;
      continue;
    }
    snapshots_.unpin(sending->place);
    sending = sendings_.erase(sending);
    moved = true;
  }
  return moved;
}

bool SnapshotStore::advance_receivings() {
  bool moved = false;
  std::vector<std::shared_ptr<Pull>> again;  // pulls within this node that met a snapshot being written
  for (auto receiving = receivings_.begin(); receiving != receivings_.end();) {
    const std::shared_ptr<Pull> pull = receiving->pull;
    if (!receiving->transfer) {
      again.push_back(pull);
      receiving = receivings_.erase(receiving);
      continue;
    }
    std::string failure;
    try {
      receiving->here = receiving->here || receiving->transfer->test();
    } catch (const PeerLost& error) {
      failure = error.what();
    }
    if (!failure.empty() || (receiving->here && receiving->told)) {
      receiving = receivings_.erase(receiving);
      finish(pull, failure.empty() ? Pull::State::kDone : Pull::State::kFailed, failure);
      moved = true;
    } else {
      ++receiving;
    }
  }
  for (const auto& pull : again) begin(pull, pull->begun);
  return moved;
}

// Ends the pull. Its transfer may still write, so the transfer keeps the memory.
void SnapshotStore::abandon(std::list<Receiving>::iterator receiving, const std::string& why) {
  const std::shared_ptr<Pull> pull = receiving->pull;
  if (receiving->transfer) {
    receiving->pull = std::make_shared<Pull>();
    receiving->pull->values = std::move(pull->values);
    abandoned_.splice(abandoned_.end(), receivings_, receiving);
  } else {
    receivings_.erase(receiving);
  }
  finish(pull, Pull::State::kFailed, why);
}

bool SnapshotStore::settled() const { return sendings_.empty() && abandoned_.empty(); }

void SnapshotStore::lost(int rank) {
  closed_[static_cast<std::size_t>(rank)] = true;
  std::erase_if(early_, [rank](const Request& request) { return request.from == rank; });
  for (auto receiving = receivings_.begin(); receiving != receivings_.end();) {
    const auto next = std::next(receiving);
    if (receiving->pull->peer == rank) abandon(receiving, "rank " + std::to_string(rank) + " is gone");
    receiving = next;
  }
}

void SnapshotStore::end(std::exception_ptr) {
  std::deque<std::shared_ptr<Pull>> armed;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    armed.swap(armed_);
  }
  snapshots_.close();
  while (!receivings_.empty()) abandon(receivings_.begin(), "the world has ended");
  for (const auto& pull : armed) finish(pull, Pull::State::kFailed, "the world has ended");
}

}  // namespace sordino
