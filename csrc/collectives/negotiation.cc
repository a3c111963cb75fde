#include "collectives/negotiation.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

namespace sordino {
namespace {

// All-reduces up to this size are worth fusing; larger ones lose nothing by going alone, and may be averaged in place.
constexpr std::size_t kSmall = std::size_t{1} << 20;

std::string text(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

const char* name_of(ReduceOp op) {
  constexpr const char* names[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
  return names[static_cast<int>(op)];
}

// Operations whose members may differ in the first extent.
bool rows_may_differ(Kind kind) { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }

bool same_shape(Kind kind, const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
  if (!rows_may_differ(kind)) return a == b;
  return a.size() == b.size() && (a.empty() || std::equal(a.begin() + 1, a.end(), b.begin() + 1));
}

void refuse_unless(bool holds, const char* what) {
  if (!holds) throw TransportError(std::string("a control message tells of ") + what);
}

bool not_negative(const std::vector<std::int64_t>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](std::int64_t number) { return number >= 0; });
}

// What differs between two announcements of the same name, or "".
std::string compare(const Announcement& a, const Announcement& b) {
  const auto differ = [](const std::string& what, const std::string& left, const std::string& right) {
    return what + ": " + left + " against " + right;
  };
  if (a.kind != b.kind) return differ("operation", sordino::name_of(a.kind), sordino::name_of(b.kind));
  if (a.dtypes.size() != b.dtypes.size()) {
    return differ("number of tensors", std::to_string(a.dtypes.size()), std::to_string(b.dtypes.size()));
  }
  for (std::size_t i = 0; i < a.dtypes.size(); ++i) {
    const std::string which = a.dtypes.size() > 1 ? " of tensor " + std::to_string(i) : "";
    if (a.dtypes[i] != b.dtypes[i]) {
      return differ("dtype" + which, std::string(sordino::name_of(a.dtypes[i])),
                    std::string(sordino::name_of(b.dtypes[i])));
    }
    if (!same_shape(a.kind, a.shapes[i], b.shapes[i]))
      return differ("shape" + which, text(a.shapes[i]), text(b.shapes[i]));
  }
  if ((a.device == 0) != (b.device == 0)) {
    const auto where = [](const Announcement& one) { return std::string(one.device == 0 ? "the CPU" : "a GPU"); };
    return differ("device", where(a), where(b));
  }
  if (a.op != b.op) return differ("reduction", name_of(a.op), name_of(b.op));
  if (a.prescale != b.prescale)
    return differ("prescale_factor", std::to_string(a.prescale), std::to_string(b.prescale));
  if (a.postscale != b.postscale)
    return differ("postscale_factor", std::to_string(a.postscale), std::to_string(b.postscale));
  if (a.kind != Kind::kAddSet && a.root != b.root)
    return differ("root rank", std::to_string(a.root), std::to_string(b.root));
  if (a.kind != Kind::kAlltoall && a.splits != b.splits) return differ("ranks", text(a.splits), text(b.splits));
  return "";
}

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* names[] = {"allreduce", "broadcast", "allgather",       "alltoall",           "reducescatter",
                                   "barrier",   "join",      "add_process_set", "remove_process_set", "exchange"};
  return names[static_cast<int>(kind)];
}

Announcement Announcement::of(const Request& request) {
  Announcement said{request.name,
                    request.kind,
                    request.op,
                    request.prescale,
                    request.postscale,
                    request.root,
                    {},
                    {},
                    request.splits,
                    request.device ? request.device->identity() : 0,
                    0};
  for (const Tensor& tensor : request.tensors) {
    said.dtypes.push_back(tensor.dtype);
    said.shapes.push_back(tensor.shape);
  }
  return said;
}

Announcement Announcement::read(Reader& reader) {
  Announcement said;
  said.name = reader.text();
  said.kind = reader.one_of(kLastKind);
  said.op = reader.one_of(kLastReduceOp);
  said.prescale = reader.get<double>();
  said.postscale = reader.get<double>();
  said.root = reader.get<int>();
  said.dtypes = reader.list<DType>();
  for (std::size_t i = 0; i < said.dtypes.size(); ++i) said.shapes.push_back(reader.list<std::int64_t>());
  said.splits = reader.list<std::int64_t>();
  refuse_unless(said.root >= -1, "a rank or an id that there is not");  // -1: before the first id
  for (const DType dtype : said.dtypes)
    refuse_unless(static_cast<int>(dtype) < kDTypeCount, "an element type that there is not");
  for (const auto& shape : said.shapes) {
    refuse_unless(!shape.empty() || !rows_may_differ(said.kind), "rows of a tensor without dimensions");
    refuse_unless(not_negative(shape), "a negative extent");
  }
  refuse_unless(not_negative(said.splits), "negative splits");
  said.device = reader.get<std::uint64_t>();
  said.abilities = reader.get<Abilities>();
  return said;
}

void Announcement::write(Writer& writer) const {
  writer.put(name).put(kind).put(op).put(prescale).put(postscale).put(root).put(dtypes);
  for (const auto& shape : shapes) writer.put(shape);
  writer.put(splits).put(device).put(abilities);
}

std::size_t Announcement::bytes() const {
  std::size_t total = 0;
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    total += std::accumulate(
        shapes[i].begin(), shapes[i].end(), size_of(dtypes[i]),
        [](std::size_t product, std::int64_t extent) { return product * static_cast<std::size_t>(extent); });
  }
  return total;
}

Decision Decision::read(Reader& reader) {
  Decision decision;
  decision.names = reader.list<std::string>();
  decision.verdict = reader.one_of(kLastVerdict);
  decision.error = reader.text();
  decision.lost = reader.list<int>();
  decision.participants = reader.list<int>();
  decision.numbers = reader.list<std::int64_t>();
  decision.abilities = reader.get<Abilities>();
  refuse_unless(!decision.names.empty(), "a decision on nothing");
  const auto& some = decision.participants;
  refuse_unless(std::adjacent_find(some.begin(), some.end(), std::greater_equal<>()) == some.end(),
                "participants that are not in order");
  return decision;
}

void Decision::write(Writer& writer) const {
  writer.put(names).put(verdict).put(error).put(lost).put(participants).put(numbers).put(abilities);
}

void Negotiation::announce(int member, Announcement said, Time now) {
  const auto known = pending_.find(said.name);
  refuse_unless(known == pending_.end() || !known->second.said[static_cast<std::size_t>(member)],
                "the same request twice");
  if (said.kind == Kind::kJoin) {
    joined_[member] = true;
    last_joined_ = members_[member];
    for (const auto& [name, pending] : pending_) ripe_.push_back(name);
  }
  const std::string name = said.name;
  Pending& pending = pending_[name];
  if (pending.said.empty()) {
    pending.said.resize(members_.size());
    pending.since = now;
  }
  pending.said[member] = std::move(said);
  ++pending.count;
  ripe_.push_back(name);
}

void Negotiation::leave(int member) {
  gone_[member] = true;
  for (const auto& [name, pending] : pending_) ripe_.push_back(name);
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
    // One that announced and then left cannot do its part either.
    if (gone_[member] && (pending.said[member] || !joined_[member])) return true;
  }
  return false;
}

std::string Negotiation::difference(const std::vector<int>& participants, const Pending& pending) const {
  const int first = participants.front();
  const Announcement& reference = *pending.said[first];
  const auto rank = [&](int member) { return "rank " + std::to_string(members_[member]); };
  for (const int member : participants) {
    const std::string what = compare(reference, *pending.said[member]);
    if (!what.empty()) return rank(first) + " and " + rank(member) + " differ in " + what;
  }
  if (reference.kind == Kind::kAlltoall) {
    for (const int member : participants) {
      const std::size_t splits = pending.said[member]->splits.size();
      if (splits != members_.size())
        return rank(member) + " has splits for " + std::to_string(splits) + " of " + std::to_string(members_.size()) +
               " ranks";
    }
  }
  if (participants.size() == members_.size()) return "";
  // Some members have joined: they can stand for zeros, and for nothing else.
  if (reference.kind == Kind::kAllreduce || reference.kind == Kind::kBarrier) return "";
  return std::string(sordino::name_of(reference.kind)) + " needs every rank, but some have joined";
}

Decision Negotiation::judge(const std::string& name, const Pending& pending) {
  Decision decision;
  decision.names = {name};
  for (std::size_t member = 0; member < members_.size(); ++member) {
    if (pending.said[member]) decision.participants.push_back(static_cast<int>(member));
  }
  const Announcement& first = *pending.said[decision.participants.front()];
  if (const std::string what = difference(decision.participants, pending); !what.empty()) {
    decision.verdict = Verdict::kMismatch;
    decision.error = std::string(sordino::name_of(first.kind)) + " '" + name + "': " + what;
    return decision;
  }
  if (first.device != 0) decision.abilities = common_abilities(pending);
  switch (first.kind) {
    case Kind::kAllgather:
      for (std::size_t tensor = 0; tensor < first.dtypes.size(); ++tensor) {
        for (const int member : decision.participants)
          decision.numbers.push_back(pending.said[member]->shapes[tensor][0]);
      }
      break;
    case Kind::kAlltoall:
      for (const int member : decision.participants) {
        const auto& splits = pending.said[member]->splits;
        decision.numbers.insert(decision.numbers.end(), splits.begin(), splits.end());
      }
      break;
    case Kind::kJoin:
      decision.numbers = {last_joined_};
      joined_.assign(members_.size(), false);
      break;
    case Kind::kAddSet:
      // Each rank has said which ids it has seen: the next one is new to all of them.
      decision.numbers = {0};
      for (const int member : decision.participants)
        decision.numbers[0] = std::max(decision.numbers[0], std::int64_t{pending.said[member]->root} + 1);
      break;
    default: break;
  }
  return decision;
}

Abilities Negotiation::common_abilities(const Pending& pending) {
  Abilities common = 0xff;
  std::set<std::uint64_t> devices;
  for (const auto& said : pending.said) {
    if (!said) continue;
    common &= said->abilities;
    if (!devices.insert(said->device).second) common &= static_cast<Abilities>(~kNccl);
  }
  return common;
}

void Negotiation::fuse(std::vector<Decision>& decisions, Decision next, const Pending& pending) {
  const Announcement& what = *pending.said[static_cast<std::size_t>(next.participants.front())];
  std::vector<std::uint64_t> devices;
  const std::size_t bytes = what.bytes();
  const bool fusible =
      next.verdict == Verdict::kRun && what.kind == Kind::kAllreduce && what.op != ReduceOp::kAdasum && bytes <= kSmall;
  if (fusible) {
    for (const int member : next.participants)
      devices.push_back(pending.said[static_cast<std::size_t>(member)]->device);
  }
  if (fusible && fusing_ && fusing_->op == what.op && fusing_->prescale == what.prescale &&
      fusing_->postscale == what.postscale && decisions.back().participants == next.participants &&
      fusing_->devices == devices && fusing_->bytes + bytes <= fusion_bytes_) {
    fusing_->bytes += bytes;
    decisions.back().names.push_back(next.names[0]);
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
    if (gone_[member]) decision.lost.push_back(members_[member]);
  }
  decision.error = "'" + name + "' needs rank " + std::to_string(decision.lost.front()) + ", which has shut down";
  return decision;
}

std::vector<Decision> Negotiation::decide() {
  std::vector<Decision> decisions;
  fusing_.reset();
  const std::vector<std::string> ripe = std::exchange(ripe_, {});
  for (const std::string& name : ripe) {
    auto found = pending_.find(name);
    if (found == pending_.end()) continue;
    const Pending& pending = found->second;
    if (needs_the_gone(pending)) {
      decisions.push_back(give_up(name, pending));
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
    Waiting one{name, Kind::kBarrier, pending.since, {}, pending.warned};
    for (std::size_t member = 0; member < members_.size(); ++member) {
      if (pending.said[member]) {
        one.kind = pending.said[member]->kind;
      } else if (!joined_[member]) {
        one.missing.push_back(members_[member]);
      }
    }
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace sordino
