// All-reduce of contiguous memory among a team, by messages. Two members swap the whole and more go round a ring
// (reduce-scatter, then all-gather: 2(N-1)/N of the bytes, the least possible); what is small goes by recursive
// doubling (log2 N rounds of the whole). Each element is folded once and then copied, or folded in a tree that is the
// same on all members: equal bits everywhere.
//
// A large vector is cut into parts, which go in several lanes side by side: while one folds, the others have bytes on
// the link.
#pragma once

#include <functional>

#include "collectives/team.h"
#include "topology/schedule.h"

namespace sordino {

class TeamAllreduce {
 public:
  // Every member's data become `post` times what all fold of theirs. small: by recursive doubling.
  TeamAllreduce(Team team, DType dtype, ReduceOp op, double post, bool small);

  // How a vector of `count` elements is cut whose parts are shared out among `teams` of `size` members each.
  struct Cut {
    std::size_t most;   // elements of a part, of all teams together
    std::size_t lanes;  // of as many parts at a time
  };
  static Cut cut(std::size_t count, DType dtype, int size, int teams);

  // Called, where there is one, with final values as soon as they are where they belong.
  using Final = std::function<void(const std::byte* data, std::size_t bytes)>;
  // `arrived`: memory for messages, of as many bytes as room() says for so many elements or more.
  Task run(std::byte* data, std::size_t count, std::byte* arrived, Tag lane, Final final = {}) const;
  std::size_t room(std::size_t count) const;

  // Whether a vector of so many bytes is to go by recursive doubling.
  static bool is_small(std::size_t bytes) { return bytes <= topology::kSmall; }

 private:
  Until fold(const std::byte* lower, const std::byte* upper, std::byte* into, std::size_t count,
             double factor = 1) const;
  Task swap(std::byte* data, std::size_t count, std::byte* arrived, Tag lane) const;
  Task ring(std::byte* data, std::size_t count, std::byte* arrived, Tag lane, Final final) const;

  const Team team_;
  const DType dtype_;
  const ReduceOp op_;
  const double post_;
  const bool small_;
  const std::size_t width_;
};

}  // namespace sordino
