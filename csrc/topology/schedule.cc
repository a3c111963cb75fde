#include "topology/schedule.h"

#include <algorithm>
#include <bit>

namespace sordino::topology {
namespace {

int wrapped(int part, int size) { return (part % size + size) % size; }

// Adds member `me`'s parent and children in a binomial tree of the members. The first member is the root.
void add_tree(const std::vector<int>& members, int me, Branch& branch) {
  const auto size = static_cast<int>(members.size());
  const auto place = static_cast<int>(std::find(members.begin(), members.end(), me) - members.begin());
  for (int distance = 1; distance < size; distance *= 2) {
    if (place < distance) {
      if (place + distance < size) branch.children.push_back(members[static_cast<std::size_t>(place + distance)]);
    } else if (place < 2 * distance) {
      branch.parent = members[static_cast<std::size_t>(place - distance)];
    }
  }
}

}  // namespace

std::vector<DoublingStep> doubling(int size, int me) {
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(size))), extra = size - power;
  const int first = extra > 0 ? 1 : 0, last = first + std::countr_zero(static_cast<unsigned>(power));
  // The last `extra` members take part only in round 0, to give their vector, and in round `last`, for the result.
  if (me >= power) return {{me - power, true, Brings::kNothing, 0}, {me - power, false, Brings::kResult, last}};
  std::vector<DoublingStep> steps;
  if (me < extra) steps.push_back({me + power, false, Brings::kPartial, 0});
  int round = first;
  for (int distance = 1; distance < power; distance *= 2)
    steps.push_back({me ^ distance, true, Brings::kPartial, round++});
  if (me < extra) steps.push_back({me + power, true, Brings::kNothing, last});
  return steps;
}

std::vector<int> combined_before(int size, int me, int round) {
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(size))), extra = size - power;
  const int first = extra > 0 ? 1 : 0;
  if (me >= power || round < first) return {me};
  const int count = 1 << (round - first), begin = me - me % count;
  std::vector<int> members;
  for (int member = begin; member < begin + count; ++member) members.push_back(member);
  for (int member = begin; member < std::min(begin + count, extra); ++member) members.push_back(member + power);
  return members;
}

bool gathers_by_doubling(std::size_t nodes, bool some_share, std::size_t bytes_of_all) {
  return nodes > (some_share ? 8U : 3U) && bytes_of_all <= kSmall;
}

RingStep ring_step(int size, int first, int step) {
  return {wrapped(first - step, size), wrapped(first - step - 1, size)};
}

std::vector<Round> all_reduce_rounds(int size, bool small) {
  std::vector<Round> rounds;
  if (size == 1) return rounds;
  if (!small && size > 2) {
    Round& round = rounds.emplace_back(Round{{}, {}, 1.0 / size, 2 * (size - 1)});
    for (int place = 0; place < size; ++place) {
      round.sources.push_back(place);
      round.targets.push_back((place + 1) % size);
    }
    return rounds;
  }
  for (int place = 0; place < size; ++place) {
    for (const DoublingStep& step : doubling(size, place)) {
      if (!step.gives) continue;
      while (static_cast<int>(rounds.size()) <= step.round) rounds.push_back({{}, {}, 1, 1});
      rounds[static_cast<std::size_t>(step.round)].sources.push_back(place);
      rounds[static_cast<std::size_t>(step.round)].targets.push_back(step.partner);
    }
  }
  return rounds;
}

std::vector<std::vector<int>> teams_of(const std::vector<std::vector<int>>& nodes, bool small) {
  const auto smaller = [](const auto& one, const auto& other) { return one.size() < other.size(); };
  const std::size_t count = small ? 1 : std::min_element(nodes.begin(), nodes.end(), smaller)->size();
  std::vector<std::vector<int>> teams(count);
  for (std::size_t place = 0; place < count; ++place) {
    for (const auto& node : nodes) teams[place].push_back(node[place]);
  }
  return teams;
}

Branch broadcast(const std::vector<int>& leaders, const std::vector<int>& node, int me, bool is_long) {
  Branch branch;
  if (node.front() == me && is_long) {
    const auto place = std::find(leaders.begin(), leaders.end(), me);
    if (place != leaders.begin()) branch.parent = *std::prev(place);
    if (std::next(place) != leaders.end()) branch.children.push_back(*std::next(place));
  } else if (node.front() == me) {
    add_tree(leaders, me, branch);
  }
  add_tree(node, me, branch);
  return branch;
}

}  // namespace sordino::topology
