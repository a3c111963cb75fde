#include "engine/negotiation.h"

#include <algorithm>
#include <set>

#include "transport/transport.h"

namespace sordino {
namespace {

// All-reduces up to this many bytes are worth fusing. Larger ones gain nothing from it, and may be averaged in place.
constexpr std::size_t kSmall = std::size_t{1} << 20;

}  // namespace

void Negotiation::announce(int member, Announcement said, AwakeTime now) {
  const auto known = pending_.find(said.name);
  if (known != pending_.end() && known->second.said[static_cast<std::size_t>(member)])
    throw TransportError("a control message announces the same request twice");
  if (collective(said.opcode).effect == Effect::kJoins) {
    joined_[member] = true;
    for (const auto& [name, pending] : pending_) to_check_.push_back(name);
  }
  const std::string name = said.name;
  Pending& pending = pending_[name];
  if (pending.said.empty()) {
    pending.said.resize(members_.size());
    pending.since = now;
  }
  pending.said[member] = std::move(said);
  ++pending.count;
  pending.last = member;
  to_check_.push_back(name);
}

void Negotiation::note_left(int member, Departure departure) {
  departed_[member] = std::move(departure);
  for (const auto& [name, pending] : pending_) to_check_.push_back(name);
}

bool Negotiation::complete(const Pending& pending) const {
  if (pending.count == static_cast<int>(members_.size())) return true;
  for (std::size_t member = 0; member < members_.size(); ++member) {
    if (!pending.said[member] && !joined_[member]) return false;
  }
  return true;
}

bool Negotiation::needs_the_gone(const Pending& pending) const {
  for (std::size_t member = 0; member < members_.size(); ++member) {
    // A member that announced and then left cannot do its part either.
    if (departed_[member] && (pending.said[member] || !joined_[member])) return true;
  }
  return false;
}

std::string Negotiation::difference(const std::vector<int>& participants, const Pending& pending) const {
  const int first = participants.front();
  const Announcement& reference = *pending.said[first];
  const auto rank = [&](int member) { return "rank " + std::to_string(members_[member]); };
  for (const int member : participants) {
    const std::string what = sordino::difference(reference, *pending.said[member]);
    if (!what.empty()) return rank(first) + " and " + rank(member) + " differ in " + what;
  }
  const Collective& what = collective(reference.opcode);
  for (const int member : what.complaint ? participants : std::vector<int>{}) {
    const std::string complaint = what.complaint(*pending.said[member], members_.size());
    if (!complaint.empty()) return rank(member) + " " + complaint;
  }
  // Some members have joined.
  if (participants.size() < members_.size() && !what.zeros_stand_in)
    return std::string(what.name) + " needs every rank, but some have joined";
  return "";
}

Decision Negotiation::judge(const std::string& name, const Pending& pending) {
  Decision decision;
  decision.names = {name};
  decision.last = members_[static_cast<std::size_t>(pending.last)];
  for (std::size_t member = 0; member < members_.size(); ++member) {
    if (pending.said[member]) decision.participants.push_back(static_cast<int>(member));
  }
  const Announcement& first = *pending.said[decision.participants.front()];
  const Collective& what = collective(first.opcode);
  if (const std::string differs = difference(decision.participants, pending); !differs.empty()) {
    decision.verdict = Verdict::kMismatch;
    decision.error = std::string(what.name) + " '" + name + "': " + differs;
    return decision;
  }
  if (first.device != 0) decision.abilities = common_abilities(pending);
  if (what.merge) {
    std::vector<const Announcement*> said;
    for (const int member : decision.participants) said.push_back(&*pending.said[member]);
    what.merge({std::move(said), decision.last, *given_}, decision.merged);
  }
  if (what.effect == Effect::kJoins) joined_.assign(members_.size(), false);
  return decision;
}

Abilities Negotiation::common_abilities(const Pending& pending) {
  Abilities common = 0xff;
  std::set<std::uint64_t> devices;
  bool sharing = false;
  for (const auto& said : pending.said) {
    if (!said) continue;
    common &= said->abilities;
    sharing |= !devices.insert(said->device).second;
  }
  if (sharing && !(common & kNcclShared)) common &= static_cast<Abilities>(~kNccl);
  return common;
}

void Negotiation::fuse(std::vector<Decision>& decisions, Decision next, const Pending& pending) {
  const Announcement& what = *pending.said[static_cast<std::size_t>(next.participants.front())];
  std::vector<std::uint64_t> devices;
  const std::size_t bytes = what.bytes();
  const bool fusible =
      next.verdict == Verdict::kRun && collective(what.opcode).fuses && what.op != ReduceOp::kAdasum && bytes <= kSmall;
  if (fusible) {
    for (const int member : next.participants)
      devices.push_back(pending.said[static_cast<std::size_t>(member)]->device);
  }
  if (fusible && fusing_ && fusing_->op == what.op && fusing_->prescale == what.prescale &&
      fusing_->postscale == what.postscale && decisions.back().participants == next.participants &&
      fusing_->devices == devices && fusing_->bytes + bytes <= fusion_bytes_) {
    fusing_->bytes += bytes;
    decisions.back().names.push_back(next.names[0]);
    decisions.back().last = next.last;
    return;
  }
  fusing_.reset();
  if (fusible) fusing_ = Fusing{what.op, what.prescale, what.postscale, bytes, std::move(devices)};
  decisions.push_back(std::move(next));
}

Decision Negotiation::give_up(const std::string& name, const Pending& pending) const {
  Decision decision;
  decision.names = {name};
  decision.verdict = Verdict::kPeerLost;
  for (std::size_t member = 0; member < members_.size(); ++member) {
    if (pending.said[member]) decision.participants.push_back(static_cast<int>(member));
    if (!departed_[member]) continue;
    const auto& [text, lost] = *departed_[member];
    if (decision.lost.empty()) decision.error = "'" + name + "' needs " + text;
    for (const int rank : lost) {
      if (std::find(decision.lost.begin(), decision.lost.end(), rank) == decision.lost.end())
        decision.lost.push_back(rank);
    }
  }
  return decision;
}

std::vector<Decision> Negotiation::decide() {
  std::vector<Decision> decisions;
  fusing_.reset();
  std::vector<std::string> names = std::exchange(to_check_, {});
  for (std::size_t next = 0; next < names.size(); ++next) {
    const std::string name = names[next];
    auto found = pending_.find(name);
    if (found == pending_.end()) continue;
    const Pending& pending = found->second;
    if (needs_the_gone(pending)) {
      decisions.push_back(give_up(name, pending));
      // A join() that fails leaves no rank joined: later operations need the rank that has left.
      const bool joins = std::any_of(pending.said.begin(), pending.said.end(), [](const auto& said) {
        return said && collective(said->opcode).effect == Effect::kJoins;
      });
      if (joins) {
        joined_.assign(members_.size(), false);
        for (const auto& [other, unused] : pending_) names.push_back(other);
      }
      fusing_.reset();
    } else if (complete(pending)) {
      fuse(decisions, judge(name, pending), pending);
    } else {
      continue;
    }
    pending_.erase(found);
  }
  return decisions;
}

std::vector<Negotiation::Waiting> Negotiation::waiting() const {
  std::vector<Waiting> all;
  for (const auto& [name, pending] : pending_) {
    Waiting one{name, Opcode::kBarrier, pending.since, {}, pending.warned, {}};
    for (std::size_t member = 0; member < members_.size(); ++member) {
      if (pending.said[member]) {
        one.opcode = pending.said[member]->opcode;
        one.called.push_back(members_[member]);
      } else if (!joined_[member]) {
        one.missing.push_back(members_[member]);
      }
    }
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace sordino
