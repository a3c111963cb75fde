// Data that a small repeat moves between nodes, unless it is an all-reduce (one_shot_nodes.h). The block of a node has
// the parts of its members' inputs that members of other nodes take. The leaders gather the blocks of all nodes.
// Then each folds the results of its node, or its ranks lay out their own:
//
//   operation               block of a node                               results on a node
//   all-gather, broadcast   the inputs of its members                     one for all members
//   all-to-all              the rows for members of other nodes           one for each member
//   reduce-scatter          folds of the parts of other nodes' members    one for each member
//   barrier                 nothing                                       nothing
//
// All members compute the same blocks from the recipes of all members.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/wire.h"
#include "collectives/repeat.h"
#include "collectives/sites.h"

namespace sordino {

class NodeBlocks {
 public:
  // Largest number of bytes of all blocks, and of the results on a node.
  static constexpr std::size_t kMostBytes = 256 * 1024;
  static constexpr std::size_t kMostMembers = 64;  // the recipes of all members have the square of this number of parts

  // Returns null if the repeat is too large. `recipe_of` returns the recipe of a member.
  static std::shared_ptr<const NodeBlocks> of(const Repeat& repeat, const Sites& sites,
                                              const std::function<Recipe(std::size_t member)>& recipe_of);

  // Bytes of the blocks of some nodes, given by site.
  std::size_t bytes(std::span<const int> sites) const;
  std::size_t bytes() const { return total_; }
  // Bytes of the results on this node, and which of these bytes are the result of the member at a place.
  std::size_t result_bytes() const { return result_bytes_; }
  Recipe::Part result(std::size_t place) const;

  // The functions below take `blocks`, memory for the blocks of all nodes, and `inputs` by place.

  // Writes the block of this node.
  void write_own(const Signature& what, std::span<const std::byte* const> inputs, std::byte* blocks) const;
  // The blocks of some nodes, one after the other. `joined` is memory that may be used for that.
  std::span<const std::byte> join(std::span<const int> sites, const std::byte* blocks, Bytes& joined) const;
  // Writes blocks that another leader has joined.
  void split(std::span<const int> sites, std::span<const std::byte> joined, std::byte* blocks) const;
  // Lays out the result of the member at a place, of an operation that folds nothing. All blocks must be there.
  void lay_out(std::size_t place, std::span<const std::byte* const> inputs, const std::byte* blocks,
               std::byte* output) const;
  // Writes the results on this node, of an operation that folds. All blocks must be there.
  void write_folds(const Signature& what, std::span<const std::byte* const> inputs, const std::byte* blocks,
                   std::byte* results) const;

 private:
  using Part = Recipe::Part;
  // A part of the input of the member at a place of this node. If the operation folds: of the inputs of all members of
  // the node.
  struct Piece {
    std::size_t place;
    Part part;
    std::size_t at;  // in the blocks
  };
  // A part of a result.
  struct Source {
    bool here;  // of an input of this node; else in the blocks
    std::size_t place, begin, bytes;
  };
  struct Result {
    Part part;
    std::vector<Source> sources;  // in the order of members; if the operation folds: in the order of nodes
  };
  struct Scaling {
    ReduceOp op;
    double pre_of_node, pre, post;
  };

  Scaling scaling_of(const Signature& what) const;
  void fold_node(const Signature& what, std::span<const std::byte* const> inputs, Part part, const Scaling& scaling,
                 std::byte* into) const;

  bool folds_ = false, some_share_ = false;
  std::size_t ranks_ = 0, total_ = 0, result_bytes_ = 0;
  std::vector<Part> extents_;    // by site: its block
  std::vector<Piece> own_;       // the block of this node
  std::vector<Result> results_;  // by place; one if all members of this node have the same
};

}  // namespace sordino
