#include "collectives/exchange_plan.h"

#include <algorithm>

namespace sordino {

ExchangePlan::ExchangePlan(Participants& participants, const Exchange& what, std::uint64_t round)
    : participants_(participants), what_(what) {
  for (int index = 0; index < participants.size(); ++index) {
    if (here(index)) node_.push_back(index);
  }
  place_ = static_cast<std::size_t>(std::find(node_.begin(), node_.end(), participants.me) - node_.begin());
  for (const LayoutSegment& run : what.layout->segments()) {
    if (groups_.empty() || groups_.back().runs.front()->group != run.group) groups_.emplace_back();
    groups_.back().runs.push_back(&run);
  }
  strides_.resize(node_.size());
  for (GroupPlan& plan : groups_) fill(plan, round);
}

// Whether this rank reads the participant's arena directly.
bool ExchangePlan::here(int index) const {
  return index == participants_.me || (what_.shared && participants_.blocks[static_cast<std::size_t>(index)]);
}

bool ExchangePlan::same_node(int a, int b) const {
  const auto& node_of = participants_.transport.node_of();
  return a == b ||
         (what_.shared && node_of[static_cast<std::size_t>(participants_.ranks[static_cast<std::size_t>(a)])] ==
                              node_of[static_cast<std::size_t>(participants_.ranks[static_cast<std::size_t>(b)])]);
}

void ExchangePlan::fill(GroupPlan& plan, std::uint64_t round) {
  const topology::At at{round, static_cast<std::uint32_t>(plan.runs.front()->group)};
  std::vector<int> destinations;
  what_.topology->destinations(at, participants_.me, destinations);
  std::sort(destinations.begin(), destinations.end());
  std::vector<int> served;  // the first destination on each other node
  std::size_t bytes = 0;
  for (const LayoutSegment* run : plan.runs) bytes += run->bytes;
  for (const int destination : destinations) {
    if (here(destination)) {
      participants_.count_sent(destination, bytes);
    } else if (std::none_of(served.begin(), served.end(), [&](int other) { return same_node(other, destination); })) {
      served.push_back(destination);
      plan.sends.push_back({destination, participants_.me, 0});
    }
  }
  topology::Row row;
  for (std::size_t place = 0; place < node_.size(); ++place) {
    what_.topology->row(at, node_[place], row);
    add(plan, static_cast<int>(place), row);
  }
  // A receive buffer has room only for runs that its rank receives: a server of parts receives them from many ranks.
  for (const LayoutSegment* run : plan.runs) {
    std::vector<std::size_t>& places = plan.places.emplace_back(strides_);
    for (std::size_t place = 0; place < node_.size(); ++place) {
      if (std::any_of(plan.receives.begin(), plan.receives.end(),
                      [&](const Parcel& parcel) { return parcel.here == node_[place]; })) {
        strides_[place] =
            (places[place] + run->bytes + Layout::kAlignment - 1) / Layout::kAlignment * Layout::kAlignment;
      }
    }
  }
}

// Vectors are numbered: first the ranks of the node, then the messages in the order of plan.receives.
void ExchangePlan::add(GroupPlan& plan, int place, const topology::Row& row) {
  if (row.sources.empty() && row.keeps_own && row.scale == 1 && !what_.without_own && what_.source == what_.result)
    return;
  kernels::Average average{{}, {place}, row.scale};
  if (row.keeps_own && !what_.without_own) average.of.push_back(place);
  for (const int source : row.sources)
    average.of.push_back(number_of(plan, source, node_[static_cast<std::size_t>(place)]));
  // Ranks that mix the same values mix them in the same order, so they get equal bits.
  std::sort(average.of.begin(), average.of.end(),
            [&](int a, int b) { return participant(plan, a) < participant(plan, b); });
  for (kernels::Average& known : plan.averages) {
    if (known.of != average.of || known.scale != average.scale) continue;
    known.into.push_back(place);
    return;
  }
  plan.averages.push_back(std::move(average));
}

int ExchangePlan::participant(const GroupPlan& plan, int number) const {
  const auto index = static_cast<std::size_t>(number);
  return index < node_.size() ? node_[index] : plan.receives[index - node_.size()].peer;
}

int ExchangePlan::number_of(GroupPlan& plan, int source, int needed_by) {
  const auto found = std::find(node_.begin(), node_.end(), source);
  if (found != node_.end()) return static_cast<int>(found - node_.begin());
  const auto known = std::find_if(plan.receives.begin(), plan.receives.end(),
                                  [&](const Parcel& parcel) { return parcel.peer == source; });
  const auto place = static_cast<int>(known - plan.receives.begin());
  if (known == plan.receives.end()) {
    const auto copy = static_cast<std::size_t>(std::count_if(
        plan.receives.begin(), plan.receives.end(), [&](const Parcel& parcel) { return parcel.here == needed_by; }));
    plan.receives.push_back({source, needed_by, copy});
    if (needed_by == participants_.me) copies_ = std::max(copies_, copy + 1);
  }
  return static_cast<int>(node_.size()) + place;
}

}  // namespace sordino
