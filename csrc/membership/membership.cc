#include "membership/membership.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "membership/epoch_transport.h"

namespace sordino::membership {
namespace {

using std::chrono::steady_clock;

constexpr std::uint32_t kNotices = 0xFFFFFFFF;  // instead of an epoch: a message between memberships
constexpr std::chrono::milliseconds kTick{10};
// Number of neighbors to which a rank reports that it is alive. While ranks agree on a new epoch, it reports to all.
constexpr int kNeighbors = 2;
// Number of such reports within the deadline.
constexpr double kOften = 20;

using Seconds = std::chrono::duration<double>;

}  // namespace

Membership::Membership(std::unique_ptr<Transport> transport, double silence_s)
    : transport_(std::move(transport)),
      silence_s_(silence_s),
      self_(transport_->rank()),
      clock_(std::min<AwakeClock::duration>(
          AwakeClock::kLongestStep, std::chrono::duration_cast<AwakeClock::duration>(Seconds(silence_s / kOften)))),
      heard_(static_cast<std::size_t>(transport_->size())),
      was_watched_(heard_.size(), false),
      last_tick_(steady_clock::now()) {
  transport_->tolerate_losses();
  view_.members.resize(heard_.size());
  std::iota(view_.members.begin(), view_.members.end(), 0);
  consensus_ = make_consensus();
}

std::unique_ptr<Consensus> Membership::make_consensus() {
  auto made = std::make_unique<Consensus>(view_, self_, [this, epoch = view_.epoch](int to, const Bytes& message) {
    send(to, Notice::kAgree, epoch, message);
  });
  made->count_tags(view_.first_tag);
  return made;
}

std::unique_ptr<Transport> Membership::enter() { return std::make_unique<EpochTransport>(shared_from_this(), view_); }

// ---- messages ------------------------------------------------------------------------------------------------------

void Membership::post(std::uint32_t epoch, int to, const Bytes& message) {
  if (epoch < view_.epoch || dead_.contains(to)) return;
  Bytes frame;
  frame.reserve(sizeof(epoch) + message.size());
  const auto* head = reinterpret_cast<const std::byte*>(&epoch);
  frame.insert(frame.end(), head, head + sizeof(epoch));
  frame.insert(frame.end(), message.begin(), message.end());
  transport_->post(to, std::move(frame));
}

void Membership::send(int to, Notice kind, std::uint32_t epoch, const Bytes& rest) {
  if (dead_.contains(to)) return;
  Bytes frame = Writer().put(kNotices).put(kind).put(epoch).take();
  frame.insert(frame.end(), rest.begin(), rest.end());
  transport_->post(to, std::move(frame));
}

bool Membership::poll(std::uint32_t epoch, const Sink& sink) {
  bool moved = false;
  if (epoch == view_.epoch && !held_.empty() && !over(epoch)) {
    // One at a time: the sink may throw, and the rest is then delivered by the next call.
    std::erase_if(held_, [epoch](const Held& one) { return one.epoch < epoch; });
    const auto due = [&] {
      return std::find_if(held_.begin(), held_.end(), [epoch](const Held& one) { return one.epoch == epoch; });
    };
    for (auto next = due(); next != held_.end(); next = due()) {
      const Held one = std::move(*next);
      held_.erase(next);
      sink(one.from, one.message);
    }
    moved = true;
  }
  moved |= receive(epoch, sink);
  const Time now = steady_clock::now();
  if (now - last_tick_ > kTick) tick(now, epoch, sink);
  return moved;
}

bool Membership::receive(std::uint32_t epoch, const Sink& sink) {
  try {
    return transport_->poll([&](int from, std::span<const std::byte> bytes) { route(epoch, from, bytes, sink); });
  } catch (const Evicted& error) {
    if (!ended()) ending_ = error.what();
    end_ = End::kEvicted;
    return true;
  }
}

void Membership::route(std::uint32_t epoch, int from, std::span<const std::byte> bytes, const Sink& sink) {
  heard_[static_cast<std::size_t>(from)] = clock_.now();
  consensus_->hear(from);
  Reader reader(bytes);
  const auto of = reader.get<std::uint32_t>();
  if (of == kNotices) return notice(from, reader);
  if (of < epoch || of < view_.epoch) return;
  const auto message = bytes.subspan(sizeof(of));
  if (of == epoch) {
    if (!over(epoch)) sink(from, message);
  } else {
    held_.push_back({from, of, Bytes(message.begin(), message.end())});
  }
}

void Membership::notice(int from, Reader& reader) {
  const auto kind = reader.get<Notice>();
  const auto epoch = reader.get<std::uint32_t>();
  if (ended()) return;
  if (kind == Notice::kFarewell) return lose({from, reader.text()});
  if (kind == Notice::kGoodbye) return epoch == view_.epoch ? left(from) : lose({from, "it has shut down", true});
  if (epoch < view_.epoch) {
    // Otherwise two ranks that know the decision would answer each other forever.
    if (kind == Notice::kAgree && Consensus::is_verdict(reader)) return;
    // The sender has not received the decision: the next epoch, which may be without it.
    send(from, Notice::kAgree, epoch, Consensus::verdict(history_[epoch + 1]));
  } else if (epoch > view_.epoch) {
    if (steady_clock::now() - last_ask_ > kTick) {
      last_ask_ = steady_clock::now();
      send(from, Notice::kAsk, view_.epoch);
    }
  } else if (kind == Notice::kAgree) {
    consensus_->receive(from, reader);
    follow();
  }
}

// Moves to the epoch that was agreed on.
void Membership::follow() {
  if (!consensus_->decided() || ended()) return;
  blamed_ = consensus_->blamed();
  const View next = *consensus_->decided();
  history_.resize(next.epoch + 1);
  history_[view_.epoch] = view_;
  history_[next.epoch] = next;
  if (next.place_of(self_) < 0) {
    end_ = End::kEvicted;
    ending_ = "the other ranks have continued without this rank: it was silent, or they could not communicate with it";
    return;
  }
  for (const int rank : view_.members) {  // adds ranks that others have accused
    if (next.place_of(rank) < 0) blamed_.try_emplace(rank, "the others continue without it, as it did not come");
  }
  view_ = next;
  tolerates_losses_ = false;  // until the next world asks for it
  losses_.clear();
  consensus_ = make_consensus();
  for (const int rank : view_.members) heard_[static_cast<std::size_t>(rank)] = clock_.now();
  for (const auto& [rank, cause] : dead_) consensus_->bury(rank, cause);
  for (const auto& [rank, cause] : dead_) {
    if (view_.place_of(rank) >= 0) return begin();
  }
}

// ---- facts ---------------------------------------------------------------------------------------------------------

void Membership::begin() {
  if (ended() || consensus_->begun()) return;
  consensus_->begin();
  follow();  // a rank that is alone decides at once
}

void Membership::left(int rank) {
  dead_.try_emplace(rank, "it has shut down");
  consensus_->bury(rank, "it has shut down");
  follow();
}

void Membership::blame(const std::vector<int>& silent, const std::vector<int>& stuck, const std::string& cause) {
  for (const int rank : silent) consensus_->silence(rank, cause);
  for (const int rank : stuck) consensus_->accuse(rank, cause);
  begin();
}

void Membership::say_goodbye() {
  for (const int rank : view_.members) {
    if (rank != self_) send(rank, Notice::kGoodbye, view_.epoch);
  }
}

void Membership::depart(const std::string& cause) {
  if (ended()) return;
  const Bytes message = Writer().put(cause).take();
  for (const int rank : view_.members) {
    if (rank != self_) send(rank, Notice::kFarewell, view_.epoch, message);
  }
  end_ = End::kEvicted;
  ending_ = "this rank has left: " + cause;
}

std::vector<Loss> Membership::take_losses() { return std::exchange(losses_, {}); }

void Membership::look_for_losses(std::uint32_t epoch, const Sink& sink) {
  const std::vector<Loss> found = transport_->take_losses();
  if (!found.empty()) receive(epoch, sink);  // a goodbye may have been sent just before the end
  for (const Loss& loss : found) lose(loss);
}

void Membership::lose(const Loss& loss) {
  if (dead_.contains(loss.rank) || view_.place_of(loss.rank) < 0) return;
  if (loss.certain) {
    dead_.emplace(loss.rank, loss.cause);
    consensus_->bury(loss.rank, loss.cause);
  } else {
    consensus_->silence(loss.rank, loss.cause);
  }
  if (tolerates_losses_) {
    losses_.push_back(loss);
  } else {
    begin();
  }
  follow();
}

// ---- time ----------------------------------------------------------------------------------------------------------

void Membership::tick(Time now, std::uint32_t epoch, const Sink& sink) {
  clock_.tick(now);
  last_tick_ = now;
  if (ended()) return;
  look_for_losses(epoch, sink);
  if (now - last_alive_ > Seconds(silence_s_ / kOften)) {
    last_alive_ = now;
    say_alive();
    consensus_->retry();
    follow();
  }
  look_for_silence();
  if (consensus_->begun() && !consensus_->has_quorum()) {
    end_ = End::kNoQuorum;
    std::string silent;
    for (const auto& [rank, cause] : consensus_->blamed()) {
      if (!consensus_->is_silent(rank)) continue;
      silent += (silent.empty() ? "" : ", ") + std::string("rank ") + std::to_string(view_.place_of(rank)) + " on " +
                transport_->host_of(rank) + " (" + cause + ")";
    }
    ending_ =
        "this rank cannot reach more than half of the others, which may continue without it, so it must stop. It "
        "cannot reach " +
        silent + ". Its data is intact";
  }
}

void Membership::say_alive() {
  const auto size = static_cast<int>(view_.members.size());
  const int place = view_.place_of(self_);
  const int count = consensus_->begun() ? size - 1 : std::min(kNeighbors, size - 1);
  for (int step = 1; step <= count; ++step) {
    send(view_.members[static_cast<std::size_t>((place + step) % size)], Notice::kAlive, view_.epoch);
  }
}

// Ranks that report to this rank that they are alive.
std::vector<int> Membership::watched() const {
  const auto size = static_cast<int>(view_.members.size());
  const int place = view_.place_of(self_);
  const int count = consensus_->begun() ? size - 1 : std::min(kNeighbors, size - 1);
  std::vector<int> ranks;
  for (int step = 1; step <= count; ++step) {
    ranks.push_back(view_.members[static_cast<std::size_t>((place + size - step) % size)]);
  }
  return ranks;
}

void Membership::look_for_silence() {
  if (tolerates_losses_ && !consensus_->begun()) return;
  std::vector<bool> is_watched(heard_.size(), false);
  bool found = false;
  for (const int rank : watched()) {
    const auto index = static_cast<std::size_t>(rank);
    is_watched[index] = true;
    if (!was_watched_[index]) heard_[index] = clock_.now();
    if (dead_.contains(rank) || consensus_->is_silent(rank) || clock_.now() - heard_[index] <= Seconds(silence_s_))
      continue;
    consensus_->silence(rank, "it has been silent for " + std::to_string(static_cast<long>(silence_s_)) + " s");
    found = true;
  }
  was_watched_ = std::move(is_watched);
  if (found) begin();
  follow();
}

// ---- the end of an epoch -------------------------------------------------------------------------------------------

std::exception_ptr Membership::reason(const View& of) const {
  if (end_ == End::kNoQuorum) return std::make_exception_ptr(NoQuorum(ending_));
  if (end_ == End::kEvicted) return std::make_exception_ptr(Evicted(ending_));
  std::string text;
  std::vector<int> ranks;
  for (const auto& [rank, cause] : view_.epoch > of.epoch ? blamed_ : consensus_->blamed()) {
    const int place = of.place_of(rank);
    if (place < 0) continue;
    ranks.push_back(place);
    text += (text.empty() ? "" : "; ") + std::string("rank ") + std::to_string(place) + " on " +
            transport_->host_of(rank) + " is lost: " + cause;
  }
  if (text.empty()) text = "another rank has failed with an error, so the ranks form a new world";
  return std::make_exception_ptr(PeerLost(text, ranks));
}

}  // namespace sordino::membership
