// Schedules of collectives that use messages. They are pure functions of the members, their nodes and the number of
// bytes, so all members compute the same schedule. The core runs them (collectives/). `sordino plan` and `sordino
// simulate` count the same messages.
//
// All-reduce, among the members of a team:
//   small vectors   recursive doubling: log2 N rounds of the whole vector, partners at distances 1, 2, 4, ...
//   two members     one round: they swap the whole vector
//   larger ones     a ring: N - 1 rounds that reduce and N - 1 that gather, each with 1/N of the vector
//
// Among nodes with several ranks, a team has one rank of every node, and reduces one stripe of the vector.
//
// All-gather between nodes:
//   small blocks, many nodes   recursive doubling among the first ranks of the nodes: each sends log2 N messages, with
//                              all blocks that it has
//   other blocks               a ring if no ranks share memory; else each block goes to one rank of each node
//
// Broadcast: one leader of each node receives the vector along a binomial tree of leaders, and passes it on along a
// binomial tree within its node. A long vector goes along a chain of leaders instead, where each link carries it once.
#pragma once

#include <cstddef>
#include <vector>

namespace sordino::topology {

// Largest all-reduce, in bytes, that uses recursive doubling.
inline constexpr std::size_t kSmall = std::size_t{64} * 1024;

// The vector that a step of recursive doubling brings: none, a partial result to combine, or the result.
enum class Brings { kNothing, kPartial, kResult };

// One member's step of recursive doubling, with one partner.
struct DoublingStep {
  int partner;  // place in the team
  bool gives;   // whether it sends its vector
  Brings brings;
  int round;  // the same for both partners
};

// All steps of the member at place `me` of `size`. Members at places from the largest power of two on first give their
// vector to a partner below it, and get the result last.
std::vector<DoublingStep> doubling(int size, int me);

// The members whose vectors `me` has combined before round `round` of recursive doubling, in a fixed order.
std::vector<int> combined_before(int size, int me, int round);

// Whether an all-gather uses recursive doubling: if all blocks together are small and there are many nodes. With few
// nodes, the other ways need no more rounds: if ranks share memory, all messages of a rank travel at the same time.
// `some_share`: some ranks share memory.
bool gathers_by_doubling(std::size_t nodes, bool some_share, std::size_t bytes_of_all);

// Parts of a vector, from 0 to size - 1, that a member of a ring gives to the next one and takes from the previous one.
struct RingStep {
  int give, take;
};

// Step `step` (0 to size - 2) of a member that gives part `first` in step 0, and then always the part that it took
// last. In a ring that reduces, `first` is the member's place, and part place + 1 is complete on the member at the end.
// In a ring that gathers, `first` is the part that the member has.
RingStep ring_step(int size, int first, int step);

// Messages that travel at the same time: message i goes from place sources[i] to place targets[i]. Each carries `share`
// of the vector. `repeats` such rounds follow each other.
struct Round {
  std::vector<int> sources, targets;
  double share;
  int repeats;
};

// All messages of an all-reduce among `size` members.
std::vector<Round> all_reduce_rounds(int size, bool small);

// The ranks of each team, from the ranks of each node. A small vector has one team: the first rank of every node. A
// larger vector has as many teams as the smallest node has ranks.
std::vector<std::vector<int>> teams_of(const std::vector<std::vector<int>>& nodes, bool small);

// The rank that a rank receives from, and the ranks that it sends to.
struct Branch {
  int parent = -1;  // -1: the root
  std::vector<int> children;
};

// The branch of rank `me` in a broadcast. `leaders` has one rank of every node, the root first. `node` has the ranks of
// this rank's node, its leader first.
Branch broadcast(const std::vector<int>& leaders, const std::vector<int>& node, int me, bool is_long);

}  // namespace sordino::topology
