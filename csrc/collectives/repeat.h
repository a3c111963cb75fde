// Repeats: what a rank remembers of an operation that all ranks of a set have done together, so that they can do it
// again without a negotiation (one_shot.h).
//
// In most repeats each member publishes its input, or where it is, and takes a part of each member's input. It folds
// these parts, or lays them one after the other:
//
//   all-reduce       every whole input             folds them
//   reduce-scatter   my rows of every input        folds them
//   all-gather       every whole input             lays them out
//   all-to-all       the rows for me               lays them out
//   broadcast        the root's whole input only   lays it out
//   barrier          nothing
//
// This table is the Recipe of each operation, which its file in this folder makes (Collective::recipe).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "collectives/announcement.h"

namespace sordino {

// An operation without its name and its memory. Ranks whose signatures differ have different operations.
struct Signature {
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kUInt8;
  double prescale = 1, postscale = 1;
  std::vector<std::int64_t> shape{0};  // of the first tensor; {0} without a tensor
  Opcode opcode = Opcode::kAllreduce;
  int root = 0;
  std::vector<std::int64_t> splits{};
  std::vector<std::pair<DType, std::vector<std::int64_t>>> more{};  // further tensors

  static Signature of(const Request& request);
  bool operator==(const Signature&) const = default;
};

// Whether the set with these ranks can repeat an operation with this signature, of one tensor at most. If not, the
// negotiation runs it, or refuses it with an error.
bool is_valid(const Signature& what, std::span<const int> ranks);
// A `Collective::valid`: the tensor has rows.
bool has_rows(const Signature& what, std::span<const int> ranks);

struct Recipe {
  struct Part {
    std::size_t begin = 0, bytes = 0;

    bool operator==(const Part&) const = default;
  };
  bool folds = false;
  std::size_t me = 0;               // index of this rank among the members
  std::vector<Part> takes;          // by member: the part of its input that this rank takes
  std::vector<std::size_t> gives;   // by member: bytes of this rank's input that it takes
  std::size_t published = 0;        // bytes of this rank's input
  std::size_t most = 0;             // bytes of the largest input
  std::vector<std::int64_t> shape;  // of the result
  std::vector<std::int64_t> rows;   // received from each member; for operations that count them

  std::size_t result_bytes() const;
};

// Writes the result that the recipe makes of the members' inputs. `output` may be the memory of the part that this rank
// takes of its own input.
void assemble(const Signature& what, const Recipe& recipe, std::span<const std::byte* const> inputs, std::byte* output);

class NodeBlocks;

struct Repeat {
  std::string name;  // of the request; without its number if the user gave no name
  Signature what;
  std::uint64_t number = 0;  // equal on all ranks, never 0
  Merged merged;
  bool direct = false;  // in a run after a negotiation, all ranks reached the memory that they needed
  // Ranks publish this for it. kShards and kLocations take two turns (one_shot_node.h).
  enum class Published : std::uint8_t {
    kNothing,  // the ranks only agree to run it
    kInputs,
    kShards,
    kLocations,
  } published = Published::kNothing;
  bool by_kernel = false;  // kLocations: private memory, too, which the kernel copies
  Recipe recipe{};         // how this rank gets its result; empty for several tensors and Adasum
  // If carried between nodes, and not an all-reduce (node_blocks.h).
  std::shared_ptr<const NodeBlocks> blocks{};

  bool carried() const { return published != Published::kNothing; }
  bool in_two_turns() const { return published == Published::kShards || published == Published::kLocations; }
};

// Unnamed operations have names such as "allreduce.noname.0.7". They match by their order, whatever their numbers.
inline constexpr std::string_view kUnnamed = ".noname.";
// The name of a repeat of an operation with this name.
std::string_view name_of_repeats(std::string_view name);
// Whether this is a name of repeats of unnamed operations.
bool is_unnamed(std::string_view name);

}  // namespace sordino
