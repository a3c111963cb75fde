// All-reduce of contiguous memory among a team, by messages:
//
//   small vectors   recursive doubling: log2 N rounds of the whole vector
//   two members     one swap of the whole vector
//   more            a ring: reduce-scatter, then all-gather; 2(N-1)/N of the bytes, the least possible
//
// Each element is folded once and then copied, or folded in the same tree on all members. So all get the same bits. A
// large vector is cut into parts, which several lanes reduce side by side: while one folds, the others keep the link
// busy.
#pragma once

#include <functional>

#include "collectives/team.h"
#include "topology/schedule.h"

namespace sordino {

class TeamAllreduce {
 public:
  // Replaces each member's data by `post` times the fold of all members' data. small: use recursive doubling.
  TeamAllreduce(Team team, DType dtype, ReduceOp op, double post, bool small);

  // Cut of a vector of `count` elements into parts. `teams` teams of `size` members each share the work on a part.
  struct Cut {
    std::size_t most;   // elements of a part, of all teams together
    std::size_t lanes;  // parts in flight at a time
  };
  static Cut cut(std::size_t count, DType dtype, int size, int teams);

  // Called, if set, with final values as soon as they are in place.
  using Final = std::function<void(const std::byte* data, std::size_t bytes)>;
  // Messages come into `received`, which is the caller's memory of room(count) bytes or more.
  Task run(std::byte* data, std::size_t count, std::byte* received, Tag lane, Final final = {}) const;
  std::size_t room(std::size_t count) const;

  // Whether a vector of this size is reduced by recursive doubling.
  static bool is_small(std::size_t bytes) { return bytes <= topology::kSmall; }

 private:
  Until fold(const std::byte* lower, const std::byte* upper, std::byte* into, std::size_t count,
             double factor = 1) const;
  Task swap(std::byte* data, std::size_t count, std::byte* received, Tag lane) const;
  Task ring(std::byte* data, std::size_t count, std::byte* received, Tag lane, Final final) const;

  const Team team_;
  const DType dtype_;
  const ReduceOp op_;
  const double post_;
  const bool small_;
  const std::size_t width_;
};

}  // namespace sordino
