#include "collectives/repeat.h"

#include <cmath>
#include <cstring>

#include "collectives/collective.h"
#include "kernels/kernels.h"

namespace sordino {

Signature Signature::of(const Request& request) {
  Signature what;
  what.op = request.op;
  what.prescale = request.prescale;
  what.postscale = request.postscale;
  what.opcode = request.opcode;
  what.root = request.root;
  what.splits = request.splits;
  for (std::size_t index = 0; index < request.tensors.size(); ++index) {
    const Tensor& tensor = request.tensors[index];
    if (index == 0) {
      what.dtype = tensor.dtype;
      what.shape = tensor.shape;
    } else {
      what.more.emplace_back(tensor.dtype, tensor.shape);
    }
  }
  return what;
}

bool is_valid(const Signature& what, std::span<const int> ranks) {
  if (!what.more.empty() || what.op == ReduceOp::kAdasum) return false;
  if (!std::isfinite(what.prescale) || !std::isfinite(what.postscale)) return false;
  const Collective& how = collective(what.opcode);
  return how.recipe && (!how.valid || how.valid(what, ranks));
}

bool has_rows(const Signature& what, std::span<const int>) { return !what.shape.empty(); }

std::size_t Recipe::result_bytes() const {
  std::size_t sum = 0;
  for (const Part& part : takes) {
    if (folds) return part.bytes;
    sum += part.bytes;
  }
  return sum;
}

void assemble(const Signature& what, const Recipe& recipe, std::span<const std::byte* const> inputs,
              std::byte* output) {
  if (recipe.folds) {
    thread_local std::vector<const std::byte*> sources;  // keeps its memory between calls
    sources.clear();
    for (std::size_t member = 0; member < inputs.size(); ++member)
      sources.push_back(inputs[member] + recipe.takes[member].begin);
    const auto [op, post] = folding_of(what.op, what.dtype, what.postscale, static_cast<int>(inputs.size()));
    kernels::reduce(op, what.dtype, sources, {&output, 1}, recipe.takes.front().bytes / size_of(what.dtype),
                    what.prescale, post);
    return;
  }
  for (std::size_t member = 0; member < inputs.size(); ++member) {
    const auto [begin, bytes] = recipe.takes[member];
    const std::byte* from = inputs[member] + begin;
    if (bytes > 0 && from != output) std::memcpy(output, from, bytes);
    output += bytes;
  }
}

std::string_view name_of_repeats(std::string_view name) {
  const auto label = name.find('.');
  if (label == std::string_view::npos || !name.substr(label).starts_with(kUnnamed)) return name;
  const std::size_t end = label + kUnnamed.size();
  return name.find_first_not_of("0123456789.", end) == std::string_view::npos ? name.substr(0, end) : name;
}

bool is_unnamed(std::string_view name) {
  const auto label = name.find('.');
  return label != std::string_view::npos && name.substr(label) == kUnnamed;
}

}  // namespace sordino
