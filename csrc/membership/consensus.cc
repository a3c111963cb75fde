#include "membership/consensus.h"

#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>

namespace sordino::membership {
namespace {

constexpr int kBallotRankBits = 24;
// Each process set of each epoch takes one tag; no job comes near this many.
constexpr int kMostTags = 1 << 30;

std::vector<int> keys(const std::map<int, std::string>& causes) {
  std::vector<int> ranks;
  for (const auto& [rank, cause] : causes) ranks.push_back(rank);
  return ranks;
}

}  // namespace

std::vector<int> members_without_fault(const std::vector<int>& ranks, const std::map<int, int>& accused,
                                       const Waits& waits) {
  const std::set<int> all(ranks.begin(), ranks.end());
  std::set<int> kept = all;
  const auto awaited_by = [&](int rank) {
    const auto found = waits.find(rank);
    return found == waits.end() ? std::set<int>{} : found->second;
  };
  std::map<int, int> suspects;  // by rank, how many have accused it; 0: none, but a suspect waits for it
  std::set<int> excused;
  const auto follow = [&](std::vector<int> next, auto&& neighbors_of, auto&& add) {
    while (!next.empty()) {
      const int rank = next.back();
      next.pop_back();
      for (const int other : neighbors_of(rank)) {
        if (add(other)) next.push_back(other);
      }
    }
  };
  const auto waiting_for = [&](int rank) {
    std::vector<int> found;
    for (const int other : kept) {
      if (other != rank && awaited_by(other).contains(rank)) found.push_back(other);
    }
    return found;
  };
  const auto excuse = [&](int left_out) {
    follow({left_out}, waiting_for, [&](int other) { return excused.insert(other).second; });
  };
  std::vector<int> first;
  for (const auto& [rank, count] : accused) {
    if (all.contains(rank) && suspects.emplace(rank, count).second) first.push_back(rank);
  }
  follow(first, awaited_by, [&](int other) { return all.contains(other) && suspects.emplace(other, 0).second; });
  for (const auto& [rank, awaited] : waits) {
    for (const int other : awaited) {
      if (!all.contains(other)) excuse(other);
    }
  }
  while (kept.size() > 1) {
    // The greatest entry is left out first: a rank that waits for no other, then the most accused one.
    std::vector<std::tuple<bool, int, int>> at_fault;
    for (const auto& [rank, count] : suspects) {
      if (!kept.contains(rank) || excused.contains(rank)) continue;
      const std::set<int> awaited = awaited_by(rank);
      const bool waits_itself = std::any_of(
          awaited.begin(), awaited.end(), [&, one = rank](int other) { return other != one && kept.contains(other); });
      at_fault.emplace_back(!waits_itself, count, rank);
    }
    if (at_fault.empty()) break;
    const int worst = std::get<2>(*std::max_element(at_fault.begin(), at_fault.end()));
    kept.erase(worst);
    excuse(worst);
  }
  return {kept.begin(), kept.end()};
}

Consensus::Consensus(View from, int self, Send send) : from_(std::move(from)), self_(self), send_(std::move(send)) {}

// ---- facts ---------------------------------------------------------------------------------------------------------

void Consensus::bury(int rank, const std::string& cause) {
  if (from_.place_of(rank) < 0 || rank == self_ || !dead_.try_emplace(rank, cause).second) return;
  if (begun_) tell_facts();
  lead();
}

void Consensus::silence(int rank, const std::string& cause) {
  if (from_.place_of(rank) < 0 || rank == self_ || dead_.contains(rank)) return;
  if (silent_.try_emplace(rank, cause).second) lead();
}

void Consensus::accuse(int rank, const std::string& cause) {
  if (from_.place_of(rank) < 0) return;
  if (rank == self_) {
    comes_ = false;
  } else if (accused_.try_emplace(rank, cause).second) {
    lead();
  }
}

void Consensus::hear(int rank) { silent_.erase(rank); }

std::map<int, std::string> Consensus::blamed() const {
  std::map<int, std::string> all = dead_;
  all.insert(silent_.begin(), silent_.end());
  all.insert(accused_.begin(), accused_.end());
  return all;
}

std::vector<int> Consensus::alive() const {
  std::vector<int> ranks;
  for (const int member : from_.members) {
    if (!dead_.contains(member)) ranks.push_back(member);
  }
  return ranks;
}

bool Consensus::has_quorum() const {
  std::size_t heard = 0;
  for (const int rank : alive()) heard += silent_.contains(rank) ? 0 : 1;
  return most(heard);
}

int Consensus::leader() const {
  for (const int rank : alive()) {
    if (!silent_.contains(rank) && !accused_.contains(rank)) return rank;
  }
  return self_;
}

// ---- messages ------------------------------------------------------------------------------------------------------

void Consensus::begin() {
  if (begun_) return;
  begun_ = true;
  tell_facts();
  lead();
}

void Consensus::tell_facts() { send_to_alive(facts()); }

Bytes Consensus::facts() const {
  Writer writer;
  writer.put(Step::kFacts).put(keys(dead_));
  for (const auto& [rank, cause] : dead_) writer.put(cause);
  return writer.take();
}

void Consensus::send_to_alive(const Bytes& message) {
  for (const int rank : alive()) {
    if (rank != self_) send_(rank, message);
  }
}

Bytes Consensus::verdict(const View& view) {
  Writer writer;
  writer.put(Step::kDecided);
  view.write(writer);
  return writer.take();
}

void Consensus::receive(int from, Reader& message) {
  if (decided_ || dead_.contains(from)) return;
  const auto step = message.one_of(kLastStep);
  if (step != Step::kFacts && step != Step::kDecided) begin();
  switch (step) {
    case Step::kFacts: handle_facts(message); break;
    case Step::kPrepare: handle_prepare(from, message); break;
    case Step::kPromise: handle_promise(from, message); break;
    case Step::kAccept: handle_accept(from, message); break;
    case Step::kAccepted:
      if (message.get<Ballot>() == ballot_ && phase_ == Phase::kProposing) accepts_.insert(from);
      break;
    case Step::kRefuse:
      promised_ = std::max(promised_, message.get<Ballot>());
      if (ballot_ < promised_) refused_ = true;
      break;
    case Step::kDecided: decide(read_view(message)); break;
  }
  lead();
}

// Reads a view that can follow this one. Throws TransportError for any other, because later code relies on it.
View Consensus::read_view(Reader& message) const {
  View view = View::read(message);
  const auto& some = view.members;
  if (view.epoch != from_.epoch + 1 || some.empty() ||
      std::adjacent_find(some.begin(), some.end(), std::greater_equal<>()) != some.end() ||
      !std::includes(from_.members.begin(), from_.members.end(), some.begin(), some.end())) {
    throw TransportError("a control message names an epoch that cannot follow epoch " + std::to_string(from_.epoch));
  }
  view.first_tag = read_tag(view.first_tag);
  return view;
}

int Consensus::read_tag(int tag) {
  if (tag < 0 || tag > kMostTags) throw TransportError("a control message names a tag that is out of range");
  return tag;
}

void Consensus::handle_facts(Reader& message) {
  bool learned = false;
  for (const int rank : message.list<int>()) {
    const std::string cause = message.text();
    if (rank != self_ && from_.place_of(rank) >= 0) learned |= dead_.try_emplace(rank, cause).second;
  }
  if (!begun_) {
    begin();  // tells the others these facts too, so that none begins without knowing why
  } else if (learned) {
    tell_facts();
  }
}

void Consensus::handle_prepare(int from, Reader& message) {
  const auto ballot = message.get<Ballot>();
  Writer writer;
  if (ballot < promised_) {
    writer.put(Step::kRefuse).put(promised_);
  } else {
    promised_ = ballot;
    std::vector<int> accused = keys(accused_);
    if (!comes_) accused.push_back(self_);
    std::vector<int> waits;  // in pairs
    for (const auto& [rank, awaited] : waits_) {
      for (const int other : awaited) waits.insert(waits.end(), {rank, other});
    }
    writer.put(Step::kPromise).put(ballot).put(accused).put(waits).put(next_tag_).put(accepted_);
    if (accepted_view_) accepted_view_->write(writer);
  }
  const Bytes answer = writer.take();
  if (from == self_) {
    Reader reader(answer);
    reader.get<Step>();
    handle_promise(self_, reader);
  } else {
    send_(from, answer);
  }
}

void Consensus::handle_promise(int from, Reader& message) {
  if (message.get<Ballot>() != ballot_ || phase_ != Phase::kPreparing) return;
  Promise promise;
  promise.accused = message.list<int>();
  const auto waits = message.list<int>();
  for (std::size_t pair = 0; pair + 1 < waits.size(); pair += 2) promise.waits[waits[pair]].insert(waits[pair + 1]);
  promise.next_tag = read_tag(message.get<int>());
  promise.accepted = message.get<Ballot>();
  if (promise.accepted > 0) promise.view = read_view(message);
  promises_[from] = std::move(promise);
}

void Consensus::handle_accept(int from, Reader& message) {
  const auto ballot = message.get<Ballot>();
  const View view = read_view(message);
  if (ballot < promised_) {
    if (from == self_) {
      refused_ = true;
    } else {
      send_(from, Writer().put(Step::kRefuse).put(promised_).take());
    }
    return;
  }
  promised_ = accepted_ = ballot;
  accepted_view_ = view;
  if (from == self_) {
    accepts_.insert(self_);
  } else {
    send_(from, Writer().put(Step::kAccepted).put(ballot).take());
  }
}

// ---- the leader ----------------------------------------------------------------------------------------------------

void Consensus::retry() {
  if (!begun_ || decided_) return;
  const bool anew = refused_;
  if (anew) phase_ = Phase::kIdle;
  lead();
  if (decided_) return;
  // A rank that was an epoch behind has dropped the messages for this one. Repeating a message does no harm.
  if (phase_ == Phase::kIdle) return send_(leader(), facts());
  if (anew) return;
  const Bytes message = phase_ == Phase::kPreparing ? prepare() : accept();
  for (const int rank : alive()) {
    const bool answered = phase_ == Phase::kPreparing ? promises_.contains(rank) : accepts_.contains(rank);
    if (rank != self_ && !answered) send_(rank, message);
  }
}

Bytes Consensus::prepare() const { return Writer().put(Step::kPrepare).put(ballot_).take(); }

Bytes Consensus::accept() const {
  Writer writer;
  writer.put(Step::kAccept).put(ballot_);
  proposed_.write(writer);
  return writer.take();
}

void Consensus::start_ballot() {
  refused_ = false;
  ballot_ = ((promised_ >> kBallotRankBits) + 1) << kBallotRankBits | static_cast<Ballot>(self_);
  phase_ = Phase::kPreparing;
  promises_.clear();
  accepts_.clear();
  const Bytes message = prepare();
  send_to_alive(message);
  Reader reader(message);
  reader.get<Step>();
  handle_prepare(self_, reader);
}

void Consensus::lead() {
  if (!begun_ || decided_) return;
  if (leader() != self_) {
    phase_ = Phase::kIdle;
    return;
  }
  if (phase_ == Phase::kIdle) start_ballot();
  if (phase_ == Phase::kPreparing) {
    std::size_t promised = 0;
    for (const int rank : alive()) {
      if (promises_.contains(rank)) {
        ++promised;
      } else if (!silent_.contains(rank)) {
        return;
      }
    }
    if (!most(promised)) return;
    phase_ = Phase::kProposing;
    proposed_ = choose();
    const Bytes message = accept();
    send_to_alive(message);
    Reader reader(message);
    reader.get<Step>();
    handle_accept(self_, reader);
  }
  std::size_t accepted = 0;
  for (const int rank : alive()) accepted += accepts_.contains(rank) ? 1 : 0;
  if (most(accepted)) decide(proposed_);
}

// Chooses the proposal: the view that an earlier leader may already have decided on, if there is one; else all ranks
// that have promised and are not at fault.
View Consensus::choose() const {
  Ballot highest = 0;
  View view{from_.epoch + 1, {}, 0};
  for (const auto& [rank, promise] : promises_) {
    if (promise.view && promise.accepted > highest) {
      highest = promise.accepted;
      view = *promise.view;
    }
  }
  if (highest > 0) return view;
  std::vector<int> ranks;
  std::map<int, int> accused;
  Waits waits;
  for (const auto& [rank, promise] : promises_) {
    view.first_tag = std::max(view.first_tag, promise.next_tag);
    if (dead_.contains(rank)) continue;
    ranks.push_back(rank);
    for (const auto& [waiting, awaited] : promise.waits) waits[waiting].insert(awaited.begin(), awaited.end());
    if (rank == self_) continue;
    for (const int other : promise.accused) ++accused[other];
  }
  for (const auto& [rank, cause] : accused_) ++accused[rank];  // including those since this rank's own promise
  if (!comes_) ++accused[self_];
  view.members = members_without_fault(ranks, accused, waits);
  return view;
}

void Consensus::decide(const View& view) {
  begun_ = true;
  decided_ = view;
  if (leader() == self_) send_to_alive(verdict(view));
}

}  // namespace sordino::membership
