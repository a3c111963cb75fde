#include "collectives/node_blocks.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "kernels/kernels.h"

namespace sordino {

std::shared_ptr<const NodeBlocks> NodeBlocks::of(const Repeat& repeat, const Sites& sites,
                                                 const std::function<Recipe(std::size_t member)>& recipe_of) {
  auto made = std::make_shared<NodeBlocks>();
  made->ranks_ = repeat.recipe.takes.size();
  made->folds_ = repeat.recipe.folds;
  made->some_share_ = sites.some_share();
  made->extents_.resize(sites.all.size());
  if (repeat.recipe.most == 0) return made;
  if (made->ranks_ > kMostMembers) return nullptr;
  std::vector<Recipe> recipes;
  std::vector<std::size_t> site_of(made->ranks_), place_of(made->ranks_);
  for (std::size_t member = 0; member < made->ranks_; ++member) recipes.push_back(recipe_of(member));
  for (std::size_t site = 0; site < sites.all.size(); ++site) {
    for (std::size_t place = 0; place < sites.all[site].size(); ++place) {
      const auto member = static_cast<std::size_t>(sites.all[site][place]);
      site_of[member] = site;
      place_of[member] = place;
    }
  }
  // Offsets of parts in the blocks, by the member that gives them (if the operation folds: the first one of the node).
  std::map<std::tuple<std::size_t, std::size_t, std::size_t>, std::size_t> offsets;
  for (std::size_t site = 0; site < sites.all.size(); ++site) {
    const std::size_t begin = made->total_, givers = made->folds_ ? 1 : sites.all[site].size();
    for (std::size_t taker = 0; taker < made->ranks_; ++taker) {
      for (std::size_t place = 0; place < givers && site_of[taker] != site; ++place) {
        const auto giver = static_cast<std::size_t>(sites.all[site][place]);
        const Part part = recipes[taker].takes[giver];
        if (part.bytes == 0 || !offsets.try_emplace({giver, part.begin, part.bytes}, made->total_).second) continue;
        if (site == sites.mine) made->own_.push_back({place, part, made->total_});
        made->total_ += part.bytes;
      }
    }
    made->extents_[site] = {begin, made->total_ - begin};
  }
  for (const std::vector<int>& site : sites.all) {
    const auto recipe = [&](int member) -> const Recipe& { return recipes[static_cast<std::size_t>(member)]; };
    const bool alike = !made->folds_ && std::all_of(site.begin(), site.end(), [&](int member) {
      return recipe(member).takes == recipe(site.front()).takes;
    });
    std::size_t bytes = 0;
    for (std::size_t place = 0; place < (alike ? 1 : site.size()); ++place) {
      const Recipe& taker = recipe(site[place]);
      Result result{{bytes, taker.result_bytes()}, {}};
      bytes += result.part.bytes;
      if (&site != &sites.own()) continue;
      for (std::size_t index = 0; index < (made->folds_ ? sites.all.size() : made->ranks_); ++index) {
        const std::size_t giver = made->folds_ ? static_cast<std::size_t>(sites.all[index].front()) : index;
        const Part part = taker.takes[giver];
        if (part.bytes == 0) continue;
        const bool here = site_of[giver] == sites.mine;
        const std::size_t begin = here ? part.begin : offsets.at({giver, part.begin, part.bytes});
        result.sources.push_back({here, place_of[giver], begin, part.bytes});
      }
      made->results_.push_back(std::move(result));
    }
    if (&site == &sites.own()) made->result_bytes_ = bytes;
    if (std::max(made->total_, bytes) > kMostBytes) return nullptr;
  }
  return made;
}

std::size_t NodeBlocks::bytes(std::span<const int> sites) const {
  std::size_t sum = 0;
  for (const int site : sites) sum += extents_[static_cast<std::size_t>(site)].bytes;
  return sum;
}

Recipe::Part NodeBlocks::result(std::size_t place) const {
  return results_.empty() ? Part{} : results_[results_.size() == 1 ? 0 : place].part;
}

// As in a negotiated reduce-scatter (collectives/reducescatter.cc): where ranks share memory, a node scales its inputs.
NodeBlocks::Scaling NodeBlocks::scaling_of(const Signature& what) const {
  const auto [op, post] = folding_of(what.op, what.dtype, what.postscale, static_cast<int>(ranks_));
  if (!some_share_) return {op, 1, what.prescale, post};
  Scaling scaling{op, what.prescale, 1, post};
  divide_first(what.dtype, op, scaling.pre_of_node, scaling.post);
  return scaling;
}

void NodeBlocks::fold_node(const Signature& what, std::span<const std::byte* const> inputs, Part part,
                           const Scaling& scaling, std::byte* into) const {
  std::vector<const std::byte*> sources;
  for (const std::byte* input : inputs) sources.push_back(input + part.begin);
  kernels::reduce(scaling.op, what.dtype, sources, {&into, 1}, part.bytes / size_of(what.dtype), scaling.pre_of_node,
                  1);
}

void NodeBlocks::write_own(const Signature& what, std::span<const std::byte* const> inputs, std::byte* blocks) const {
  for (const auto& [place, part, at] : own_) {
    if (folds_) {
      fold_node(what, inputs, part, scaling_of(what), blocks + at);
    } else {
      std::memcpy(blocks + at, inputs[place] + part.begin, part.bytes);
    }
  }
}

std::span<const std::byte> NodeBlocks::join(std::span<const int> sites, const std::byte* blocks, Bytes& joined) const {
  if (sites.size() == 1) {
    const auto& [begin, bytes] = extents_[static_cast<std::size_t>(sites.front())];
    return {blocks + begin, bytes};
  }
  joined.clear();
  for (const int site : sites) {
    const auto& [begin, bytes] = extents_[static_cast<std::size_t>(site)];
    joined.insert(joined.end(), blocks + begin, blocks + begin + bytes);
  }
  return joined;
}

void NodeBlocks::split(std::span<const int> sites, std::span<const std::byte> joined, std::byte* blocks) const {
  for (const int site : sites) {
    const auto& [begin, bytes] = extents_[static_cast<std::size_t>(site)];
    std::copy_n(joined.begin(), bytes, blocks + begin);
    joined = joined.subspan(bytes);
  }
}

void NodeBlocks::lay_out(std::size_t place, std::span<const std::byte* const> inputs, const std::byte* blocks,
                         std::byte* output) const {
  if (results_.empty()) return;
  for (const auto& [here, giver, begin, bytes] : results_[results_.size() == 1 ? 0 : place].sources) {
    const std::byte* from = (here ? inputs[giver] : blocks) + begin;
    if (from != output) std::memcpy(output, from, bytes);
    output += bytes;
  }
}

void NodeBlocks::write_folds(const Signature& what, std::span<const std::byte* const> inputs, const std::byte* blocks,
                             std::byte* results) const {
  for (const auto& [part, sources] : results_) {
    if (part.bytes == 0) continue;
    std::byte* into = results + part.begin;
    const Scaling scaling = scaling_of(what);
    Bytes own(part.bytes);
    std::vector<const std::byte*> folded;
    for (const Source& source : sources) {
      folded.push_back(source.here ? own.data() : blocks + source.begin);
      if (source.here) fold_node(what, inputs, {source.begin, source.bytes}, scaling, own.data());
    }
    kernels::reduce(scaling.op, what.dtype, folded, {&into, 1}, part.bytes / size_of(what.dtype), scaling.pre,
                    scaling.post);
  }
}

}  // namespace sordino
