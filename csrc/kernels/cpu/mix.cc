#include "kernels/mix.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/cpu/table.h"
#include "kernels/kernels.h"

namespace sordino::kernels {
bool clashes(std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
             std::span<const Average> averages) {
  for (const Average& writer : averages) {
    for (const int into : writer.into) {
      for (const Average& reader : averages) {
        if (&reader == &writer) continue;
        for (const int of : reader.of) {
          if (inputs[static_cast<std::size_t>(of)] == outputs[static_cast<std::size_t>(into)]) return true;
        }
      }
    }
  }
  return false;
}

namespace {

void reduce_share(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                  const Share& share, std::size_t count) {
  static thread_local std::vector<const std::byte*> sources;
  static thread_local std::vector<std::byte*> destinations;
  sources.clear();
  destinations.clear();
  for (std::size_t k = 0; k < share.of_count; ++k) sources.push_back(inputs[static_cast<std::size_t>(share.of[k])]);
  for (std::size_t k = 0; k < share.into_count; ++k)
    destinations.push_back(outputs[static_cast<std::size_t>(share.into[k])]);
  if (sources.empty()) {
    for (std::byte* destination : destinations) std::memset(destination, 0, count * size_of(type));
  } else {
    reduce(ReduceOp::kSum, type, sources, destinations, count, 1, share.scale);
  }
}

}  // namespace

void mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
         std::span<const Average> averages, std::size_t count) {
  const MixFn function = current_table().mix[static_cast<int>(type)];
  static thread_local std::vector<std::byte> scratch;
  static thread_local std::vector<const std::byte*> sources;  // inputs that some average reads
  static thread_local std::vector<int> rows;                  // by input: its index in `sources`, or -1
  static thread_local std::vector<std::vector<int>> of;       // by average: its inputs, as indices in `sources`
  static thread_local std::vector<Share> shares;
  sources.clear();
  shares.clear();
  rows.assign(inputs.size(), -1);
  of.resize(std::max(of.size(), averages.size()));
  for (std::size_t k = 0; k < averages.size(); ++k) {
    const Average& average = averages[k];
    if (average.into.empty()) continue;
    of[k].clear();
    for (const int input : average.of) {
      int& row = rows[static_cast<std::size_t>(input)];
      if (row < 0) {
        row = static_cast<int>(sources.size());
        sources.push_back(inputs[static_cast<std::size_t>(input)]);
      }
      of[k].push_back(row);
    }
    shares.push_back({of[k].data(), of[k].size(), average.into.data(), average.into.size(), average.scale});
  }
  if (shares.size() == 1 || function == nullptr) {  // one reduction per average
    if (shares.size() > 1 && clashes(inputs, outputs, averages))
      throw UsageError("kernels::mix: averages of " + std::string(name_of(type)) +
                       " must not write vectors that other averages read");
    for (const Share& share : shares) reduce_share(type, sources, outputs, share, count);
    return;
  }
  scratch.resize(std::max(scratch.size(), (sources.size() + 1) * kMixTile * sizeof(double)));
  function({sources.data(), sources.size(), outputs.data(), shares.data(), shares.size(), count, scratch.data()});
}

}  // namespace sordino::kernels
