#include "collectives/one_shot_nodes.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kernels/kernels.h"
#include "topology/schedule.h"

namespace sordino {
namespace {

// A rank that has not published for this long may be stopped, so that it cannot decline. Its leader declines for it.
constexpr std::chrono::milliseconds kStandsStill{500};

struct Scaling {
  ReduceOp op;
  double pre, post;
};

// As in a negotiated all-reduce (collectives/allreduce.cc).
Scaling scaling_of(const Signature& what, std::size_t ranks) {
  const auto [op, post] = folding_of(what.op, what.dtype, what.postscale, static_cast<int>(ranks));
  Scaling scaling{op, what.prescale, post};
  divide_first(what.dtype, op, scaling.pre, scaling.post);
  return scaling;
}

}  // namespace

// The answer is the same on all ranks: it depends only on the sizes of all inputs and nodes.
Repeat::Published OneShotNodes::publishes(Repeat& repeat,
                                          const std::function<Recipe(std::size_t member)>& recipe_of) const {
  if (repeat.recipe.most > OneShotSlots::kMostBytes) return Repeat::Published::kNothing;
  if (repeat.what.opcode == Opcode::kAllreduce) return Repeat::Published::kInputs;
  repeat.blocks = NodeBlocks::of(repeat, sites_, recipe_of);
  return repeat.blocks ? Repeat::Published::kInputs : Repeat::Published::kNothing;
}

void OneShotNodes::deliver_blocks(const Repeat& repeat, const std::byte* input, const std::byte* blocks,
                                  std::byte* output) {
  if (repeat.recipe.folds) {
    const auto [begin, bytes] = repeat.blocks->result(me_);
    if (bytes > 0) std::memcpy(output, results_ + begin, bytes);
    return;
  }
  inputs_.resize(slots_.size());
  for (std::size_t place = 0; place < slots_.size(); ++place)
    inputs_[place] = place == me_ ? input : slots_[place]->data(turn_ - 1, repeat.recipe.most);
  repeat.blocks->lay_out(me_, inputs_, blocks, output);
}

OneShotLeader::OneShotLeader(std::vector<OneShotSlots*> slots, Sites sites, std::size_t ranks, std::byte* results,
                             Send send)
    : OneShotNodes(std::move(slots), std::move(sites), ranks, results),
      send_(std::move(send)),
      gone_(sites_.own().size(), false) {
  for (const auto& site : sites_.all) partners_.emplace_back().member = site.front();
  using enum Step::Does;
  using topology::Brings;
  const auto count = static_cast<int>(sites_.all.size()), mine = static_cast<int>(sites_.mine);
  for (const auto& [place, gives, brings, round] : topology::doubling(count, mine)) {
    const auto partner = static_cast<std::size_t>(place);
    if (gives) steps_.push_back({kSend, partner, topology::combined_before(count, mine, round)});
    // A partner that sends before it waits for anything may not know that this rank waits for it.
    if (!gives && brings == Brings::kPartial) steps_.push_back({kCall, partner, {}});
    if (brings != Brings::kNothing)
      steps_.push_back(
          {brings == Brings::kPartial ? kMerge : kReplace, partner, topology::combined_before(count, place, round)});
  }
}

void OneShotLeader::enter(std::shared_ptr<const Repeat> repeat, Entry entry, const std::byte* input, const std::byte*) {
  own_ = Own::kEntered;
  repeat_ = std::move(repeat);
  entry_ = entry;
  input_ = input;
}

bool OneShotLeader::close() {
  if (!over()) {
    abandon();  // the world has failed: the input of this rank is not valid any more
    return false;
  }
  const bool agreed = entry_.number != 0;
  next_turn();
  return agreed;
}

bool OneShotLeader::withdraw() {
  if (begun_ || abandoned_) return false;
  decline();
  return true;
}

bool OneShotLeader::deliver(const Repeat& repeat, const std::byte* input, std::byte* output) {
  if (repeat.blocks) {
    deliver_blocks(repeat, input, blocks(), output);
  } else if (!partial_.empty()) {
    std::memcpy(output, partial_.data(), partial_.size());
  }
  return true;
}

std::vector<OneShot::Number> OneShotLeader::awaited() {
  std::vector<Number> numbers;
  if (abandoned_ || own_ != Own::kNothing) return numbers;
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (has_entered(place, turn_)) numbers.push_back(number_of(place, turn_));
  }
  for (std::size_t site = 0; site < partners_.size(); ++site) {
    if (arrived(site).turn == turn_) numbers.push_back(arrived(site).entry.number);
    if (partners_[site].called == turn_) numbers.push_back(partners_[site].called_for);
  }
  return numbers;
}

void OneShotLeader::note_left(int member) {
  OneShot::note_left(member);
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
  if (from == partners_.end() || from - partners_.begin() == static_cast<std::ptrdiff_t>(sites_.mine) || !in_time ||
      data.size() > NodeBlocks::kMostBytes || what.late < -1 || what.late >= static_cast<int>(ranks_) ||
      (!what.call && from->arrived[what.turn % 2].turn == what.turn))
    throw TransportError("member " + std::to_string(member) + " of a process set sent a one-shot message out of turn");
  if (what.call) {
    from->called = what.turn;
    from->called_for = what.entry.number;
    from->late = what.late;
    return;
  }
  Arrived& arrived = from->arrived[what.turn % 2];
  arrived.turn = what.turn;
  arrived.entry = what.entry;
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
      send_(partner.member, {turn_, entry_, true, late_}, {});
  }
}

// Shows the ranks of the node that some rank waits in this turn. Returns false if none does.
bool OneShotLeader::show_call(Time now) {
  Number number = own_ == Own::kEntered ? entry_.number : 0;
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

// Begins the turn if the outcome of this node is known: a partial result, or "no result". Returns whether it began.
bool OneShotLeader::begin(Time now) {
  if (!show_call(now)) return false;
  bool complete = own_ == Own::kEntered, none = own_ == Own::kDeclined;
  std::optional<Entry> first;
  if (own_ == Own::kEntered) first = entry_;
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (has_entered(place, turn_)) {
      const Entry entry{number_of(place, turn_), slot(place, turn_).after};
      none |= entry.number == 0 || entry != first.value_or(entry);
      first = entry;
    } else if (gone_[place]) {
      none = true;
    } else if (has_entered(place, turn_ - 1)) {
      complete = false;
    } else {
      return false;  // it may still read the slot of this turn
    }
  }
  for (std::size_t site = 0; site < partners_.size(); ++site)
    none |= arrived(site).turn == turn_ && arrived(site).entry.number == 0;
  none |= now - *since_ > kStandsStill;
  if (!complete && !none) return false;
  if (!none) {
    slots_[0]->begun.store(turn_);
    for (std::size_t place = 1; place < slots_.size(); ++place) none |= counted(place, turn_) == 0;
  }
  if (none) {
    entry_ = {};
  } else {
    fold();
  }
  return begun_ = true;
}

void OneShotLeader::fold() {
  const Recipe& recipe = repeat_->recipe;
  inputs_.resize(slots_.size());
  inputs_[0] = input_;
  for (std::size_t place = 1; place < slots_.size(); ++place) inputs_[place] = slots_[place]->data(turn_, recipe.most);
  if (repeat_->blocks) {
    blocks_.resize(repeat_->blocks->bytes());
    repeat_->blocks->write_own(repeat_->what, inputs_, blocks());
    return;
  }
  partial_.resize(recipe.published);
  if (!partial_.empty()) reduce_partial(inputs_, scaling_of(repeat_->what, ranks_).pre);
}

void OneShotLeader::reduce_partial(std::span<const std::byte* const> sources, double pre) {
  const Signature& what = repeat_->what;
  std::byte* into = partial_.data();
  kernels::reduce(scaling_of(what, ranks_).op, what.dtype, sources, {&into, 1}, partial_.size() / size_of(what.dtype),
                  pre, 1);
}

// Returns whether the step is done.
bool OneShotLeader::follow(const Step& step) {
  Partner& partner = partners_[step.site];
  Arrived& theirs = arrived(step.site);
  const bool here = theirs.turn == turn_;
  switch (step.does) {
    case Step::Does::kCall:
      if (!here && !partner.gone) send_(partner.member, {turn_, entry_, true}, {});
      return true;
    case Step::Does::kSend:
      if (!partner.gone) send_(partner.member, {turn_, entry_, false}, outgoing(step));
      return true;
    case Step::Does::kMerge:
    case Step::Does::kReplace:
      if (here) {
        combine(theirs, step);
      } else if (partner.gone) {
        entry_ = {};
      }
      return here || partner.gone;
  }
  return false;
}

std::span<const std::byte> OneShotLeader::outgoing(const Step& step) {
  if (entry_.number == 0) return {};
  return repeat_->blocks ? repeat_->blocks->join(step.sites, blocks(), joined_) : std::span(partial_);
}

void OneShotLeader::combine(Arrived& theirs, const Step& step) {
  if (theirs.entry != entry_) entry_ = {};
  if (entry_.number == 0) return;
  const NodeBlocks* blocks = repeat_->blocks.get();
  const std::size_t expected = blocks ? blocks->bytes(step.sites) : partial_.size();
  if (theirs.data.size() != expected)
    throw TransportError("member " + std::to_string(partners_[step.site].member) + " of a process set sent " +
                         std::to_string(theirs.data.size()) + " bytes where " + std::to_string(expected) +
                         " were expected");
  if (blocks) {
    blocks->split(step.sites, theirs.data, this->blocks());
  } else if (step.does == Step::Does::kReplace) {
    partial_.swap(theirs.data);
  } else if (!partial_.empty()) {
    const bool lower = sites_.mine < step.site;
    const std::byte* sources[] = {lower ? partial_.data() : theirs.data.data(),
                                  lower ? theirs.data.data() : partial_.data()};
    reduce_partial(sources, 1);
  }
}

void OneShotLeader::tell() {
  const std::byte* data = nullptr;  // to publish
  std::size_t bytes = 0, most = 0;
  if (const NodeBlocks* made = entry_.number == 0 ? nullptr : repeat_->blocks.get()) {
    if (!repeat_->recipe.folds) {
      data = input_;
      bytes = repeat_->recipe.published;
      most = repeat_->recipe.most;
    } else {
      if (slots_.size() == 1) {
        own_results_.resize(made->result_bytes());
        results_ = own_results_.data();
      }
      made->write_folds(repeat_->what, inputs_, blocks(), results_);
    }
  } else if (entry_.number != 0 && !partial_.empty()) {
    const Signature& what = repeat_->what;
    const double post = scaling_of(what, ranks_).post;
    if (post != 1) kernels::scale(what.dtype, partial_.data(), partial_.size() / size_of(what.dtype), post);
    data = partial_.data();
    bytes = most = partial_.size();
  }
  told_ = turn_;
  if (slots_.size() > 1) publish(entry_, data, bytes, most);
  if (own_ != Own::kEntered) next_turn();
}

void OneShotLeader::next_turn() {
  ++turn_;
  own_ = Own::kNothing;
  since_.reset();
  begun_ = false;
  entry_ = {};
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
