#include "collectives/one_shot_nodes.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kernels/kernels.h"
#include "topology/schedule.h"

namespace sordino {
namespace {

// A rank that has not published for this long may be stopped, and not decline. Its leader then declines for it.
constexpr std::chrono::milliseconds kStandsStill{500};

struct Scaling {
  ReduceOp op;
  double pre, post;
};

// As in a negotiated all-reduce (collectives/allreduce.cc).
Scaling scaling_of(const OneShot::What& what, std::size_t ranks) {
  const auto [op, post] = folding_of(what.op, what.postscale, static_cast<int>(ranks));
  Scaling scaling{op, what.prescale, post};
  divide_first(what.dtype, op, scaling.pre, scaling.post);
  return scaling;
}

}  // namespace

OneShotLeader::OneShotLeader(std::vector<OneShotSlots*> slots, const std::vector<std::vector<int>>& sites,
                             std::size_t mine, std::size_t ranks, Send send)
    : OneShot(std::move(slots), sites[mine], 0, ranks),
      mine_(mine),
      send_(std::move(send)),
      gone_(sites[mine].size(), false) {
  for (const auto& site : sites) partners_.emplace_back().member = site.front();
  using enum Step::Does;
  using topology::Brings;
  for (const auto& [place, gives, brings, round] :
       topology::doubling(static_cast<int>(sites.size()), static_cast<int>(mine))) {
    const auto partner = static_cast<std::size_t>(place);
    if (gives) steps_.push_back({kSend, partner});
    // A partner that sends before it waits for anything may not know that this rank waits for it.
    if (!gives && brings == Brings::kPartial) steps_.push_back({kCall, partner});
    if (brings != Brings::kNothing) steps_.push_back({brings == Brings::kPartial ? kMerge : kReplace, partner});
  }
}

void OneShotLeader::enter(Number number, const What& what, const std::byte* input) {
  own_ = Own::kLaid;
  what_ = what;
  input_ = input;
  number_ = number;
}

bool OneShotLeader::take(const What& what, const std::byte*, std::byte* output) {
  if (!over()) {
    abandon();  // the world has failed: the input of this rank is not valid any more
    return false;
  }
  const bool agreed = number_ != 0;
  if (const std::size_t bytes = what.bytes(); agreed && bytes > 0) std::memcpy(output, partial_.data(), bytes);
  next_turn();
  return agreed;
}

std::vector<OneShot::Number> OneShotLeader::awaited() {
  std::vector<Number> numbers;
  if (abandoned_ || own_ != Own::kNothing) return numbers;
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (has_entered(place, turn_)) numbers.push_back(slot(place, turn_).operation);
  }
  for (std::size_t site = 0; site < partners_.size(); ++site) {
    if (arrived(site).turn == turn_) numbers.push_back(arrived(site).number);
    if (partners_[site].called == turn_) numbers.push_back(partners_[site].called_for);
  }
  return numbers;
}

void OneShotLeader::leave(int member) {
  OneShot::leave(member);
  for (std::size_t place = 0; place < members_.size(); ++place)
    gone_[place] = gone_[place] || members_[place] == member;
  for (Partner& partner : partners_) partner.gone |= partner.member == member;
}

void OneShotLeader::receive(int member, const Partial& what, std::span<const std::byte> data) {
  if (abandoned_) return;
  const auto from = std::find_if(partners_.begin(), partners_.end(),
                                 [member](const Partner& partner) { return partner.member == member; });
  // A partner is at most one turn ahead, and sends one outcome per turn.
  const bool in_time = what.turn == turn_ || what.turn == turn_ + 1;
  if (from == partners_.end() || from - partners_.begin() == static_cast<std::ptrdiff_t>(mine_) || !in_time ||
      data.size() > OneShotSlots::kMostBytes || what.late < -1 || what.late >= static_cast<int>(ranks_) ||
      (!what.call && from->arrived[what.turn % 2].turn == what.turn))
    throw TransportError("member " + std::to_string(member) + " of a process set sent a one-shot message out of turn");
  if (what.call) {
    from->called = what.turn;
    from->called_for = what.number;
    from->late = what.late;
    return;
  }
  Arrived& arrived = from->arrived[what.turn % 2];
  arrived.turn = what.turn;
  arrived.number = what.number;
  arrived.data.assign(data.begin(), data.end());
}

bool OneShotLeader::advance(Time now) {
  if (abandoned_ || told_ == turn_) return false;
  bool moved = !begun_ && begin(now);
  while (begun_ && step_ < steps_.size() && follow(steps_[step_])) {
    moved = true;
    ++step_;
  }
  if (begun_ && step_ == steps_.size()) {
    tell();
    return true;
  }
  if (since_ && now - *since_ > kStandsStill) name_late();
  return moved;
}

// Names a missing member to the ranks that wait for this rank: its node, and partners that it has yet to send to.
void OneShotLeader::name_late() {
  const std::vector<int> members = missing();
  if (members.empty() || members.front() == late_) return;
  late_ = members.front();
  slots_[0]->late.store(turn_ * ranks_ + static_cast<std::uint64_t>(late_));
  for (std::size_t later = step_; later < steps_.size(); ++later) {
    const Partner& partner = partners_[steps_[later].site];
    if (steps_[later].does == Step::Does::kSend && !partner.gone)
      send_(partner.member, {turn_, number_, true, late_}, {});
  }
}

// Shows the ranks of the node that some rank waits in this turn. Returns false if none does.
bool OneShotLeader::show_call(Time now) {
  Number number = own_ == Own::kLaid ? number_ : 0;
  if (own_ == Own::kNothing) {
    const std::vector<Number> numbers = awaited();
    if (numbers.empty()) return false;
    number = numbers.front();
  }
  if (!since_) since_ = now;
  if (slots_[0]->called.load() < turn_) {
    slots_[0]->called_for.store(number);
    slots_[0]->called.store(turn_);
  }
  return true;
}

// Begins the turn if the outcome of this node is known: a partial result, or "no result". Returns whether it is.
bool OneShotLeader::begin(Time now) {
  if (!show_call(now)) return false;
  bool complete = own_ == Own::kLaid, none = own_ == Own::kDeclined;
  std::optional<Number> first;
  if (own_ == Own::kLaid) first = number_;
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (has_entered(place, turn_)) {
      const Number number = slot(place, turn_).operation;
      none |= number == 0 || number != first.value_or(number);
      first = number;
    } else if (gone_[place]) {
      none = true;
    } else if (has_entered(place, turn_ - 1)) {
      complete = false;
    } else {
      return false;  // it may still read the slot of this turn
    }
  }
  for (std::size_t site = 0; site < partners_.size(); ++site)
    none |= arrived(site).turn == turn_ && arrived(site).number == 0;
  none |= now - *since_ > kStandsStill;
  if (!complete && !none) return false;
  if (none) {
    number_ = 0;
  } else {
    fold();
  }
  return begun_ = true;
}

void OneShotLeader::fold() {
  const std::size_t bytes = what_.bytes();
  partial_.resize(bytes);
  sources_.resize(slots_.size());
  sources_[0] = input_;
  for (std::size_t place = 1; place < slots_.size(); ++place) sources_[place] = slot(place, turn_).data(bytes);
  const Scaling scaling = scaling_of(what_, ranks_);
  std::byte* into = partial_.data();
  kernels::reduce(scaling.op, what_.dtype, sources_, {&into, 1}, what_.count(), scaling.pre, 1);
}

// Returns whether the step is done.
bool OneShotLeader::follow(const Step& step) {
  Partner& partner = partners_[step.site];
  Arrived& theirs = arrived(step.site);
  const bool here = theirs.turn == turn_;
  switch (step.does) {
    case Step::Does::kCall:
      if (!here && !partner.gone) send_(partner.member, {turn_, number_, true}, {});
      return true;
    case Step::Does::kSend:
      if (!partner.gone)
        send_(partner.member, {turn_, number_, false}, number_ == 0 ? std::span<std::byte>() : partial_);
      return true;
    case Step::Does::kMerge:
    case Step::Does::kReplace:
      if (here) {
        combine(theirs, step);
      } else if (partner.gone) {
        number_ = 0;
      }
      return here || partner.gone;
  }
  return false;
}

void OneShotLeader::combine(Arrived& theirs, const Step& step) {
  if (theirs.number != number_) number_ = 0;
  if (number_ == 0) return;
  if (theirs.data.size() != partial_.size())
    throw TransportError("member " + std::to_string(partners_[step.site].member) + " of a process set sent " +
                         std::to_string(theirs.data.size()) + " bytes where " + std::to_string(partial_.size()) +
                         " were expected");
  if (step.does == Step::Does::kReplace) {
    partial_.swap(theirs.data);
    return;
  }
  const bool lower = mine_ < step.site;
  const std::byte* sources[] = {lower ? partial_.data() : theirs.data.data(),
                                lower ? theirs.data.data() : partial_.data()};
  std::byte* into = partial_.data();
  kernels::reduce(scaling_of(what_, ranks_).op, what_.dtype, sources, {&into, 1}, what_.count(), 1, 1);
}

void OneShotLeader::tell() {
  if (number_ != 0) {
    const double post = scaling_of(what_, ranks_).post;
    if (post != 1) kernels::scale(what_.dtype, partial_.data(), what_.count(), post);
  }
  told_ = turn_;
  if (slots_.size() > 1) publish(number_, partial_.data(), number_ == 0 ? 0 : partial_.size());
  if (own_ != Own::kLaid) next_turn();
}

void OneShotLeader::next_turn() {
  ++turn_;
  own_ = Own::kNothing;
  since_.reset();
  begun_ = false;
  number_ = 0;
  step_ = 0;
  late_ = -1;
}

std::vector<int> OneShotLeader::missing() const {
  std::vector<int> members;
  if (abandoned_ || told_ == turn_) return members;
  if (begun_) {
    const Partner& partner = partners_[steps_[step_].site];
    return {partner.called == turn_ && partner.late >= 0 ? partner.late : partner.member};
  }
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (!has_entered(place, turn_)) members.push_back(members_[place]);
  }
  return members;
}

}  // namespace sordino
