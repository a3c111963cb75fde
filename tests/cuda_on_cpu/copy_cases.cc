// Cases of flatten and unflatten, and of gossip's averages.
#include <algorithm>
#include <numeric>

#include "cases.h"
#include "kernels/mix.h"

namespace sordino::on_cpu_test {
namespace {

using kernels::Average;
using kernels::Span;

constexpr std::size_t kSizes[] = {0, 1, 15, 16, 17, 31, 33, 255, 4095, 4096, 4097, 16383, 16385};
std::size_t any_size() {
  const std::size_t choice = dice().below(std::size(kSizes) + 2);
  return choice < std::size(kSizes) ? kSizes[choice] : dice().below(40000);
}

void start_copies(Runner& runner, std::size_t tensors, bool aligned, std::size_t bytes) {
  Case one("flatten of " + std::to_string(tensors));
  std::vector<std::size_t> sizes(tensors), pieces(tensors), copies(tensors);
  std::size_t total = 0;
  for (std::size_t k = 0; k < tensors; ++k) {
    sizes[k] = bytes != 0 ? dice().below(bytes) : any_size();
    pieces[k] = one.add<std::uint8_t>(sizes[k], aligned ? 0 : dice().below(33));
    copies[k] = one.add<std::uint8_t>(sizes[k], aligned ? 0 : dice().below(33));
    total += sizes[k];
  }
  const std::size_t flat = one.add<std::uint8_t>(total, aligned ? 0 : dice().below(33));
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    std::vector<Span> from, to;
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      from.push_back({base + pieces[k], sizes[k]});
      to.push_back({base + copies[k], sizes[k]});
    }
    kernels.flatten(from, base + flat, stream);
    kernels.unflatten(base + flat, to, stream);
  };
  runner.start(std::move(one));
}

// Averages in which each output is named once at most, and inputs at random.
std::vector<Average> random_averages(std::size_t vectors, std::size_t most) {
  std::vector<int> targets(vectors);
  std::iota(targets.begin(), targets.end(), 0);
  for (std::size_t k = vectors; k > 1; --k) std::swap(targets[k - 1], targets[dice().below(k)]);
  std::vector<Average> all;
  while (!targets.empty() && all.size() < most) {
    Average average;
    for (std::size_t left = dice().below(5); left > 0; --left) {
      average.of.push_back(static_cast<int>(dice().below(vectors)));
    }
    std::sort(average.of.begin(), average.of.end());
    average.of.erase(std::unique(average.of.begin(), average.of.end()), average.of.end());
    for (std::size_t left = 1 + dice().below(2); left > 0 && !targets.empty(); --left) {
      average.into.push_back(targets.back());
      targets.pop_back();
    }
    const bool copy = average.of.size() == 1 && dice().below(2) != 0;
    average.scale = copy ? 1 : 1.0 / (1.0 + static_cast<double>(average.of.size()));
    all.push_back(average);
  }
  return all;
}

template <class T>
void start_mix(Runner& runner, DType type, std::size_t vectors, std::size_t most, std::size_t count, int phases,
               bool separate) {
  Case one("mix of " + std::string(name_of(type)) + ", " + std::to_string(vectors) + " vectors of " +
           std::to_string(count) + ", phases " + std::to_string(phases) + (separate ? ", separate" : ""));
  std::vector<std::size_t> inputs, outputs;
  for (std::size_t k = 0; k < vectors; ++k) inputs.push_back(one.add<T>(count, phase_of(phases, k, sizeof(T))));
  for (std::size_t k = 0; k < vectors; ++k) {
    outputs.push_back(separate ? one.add<T>(count, phase_of(phases, k, sizeof(T))) : inputs[k]);
  }
  const auto averages = random_averages(vectors, most);
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    for (const std::size_t offset : inputs) from.push_back(base + offset);
    for (const std::size_t offset : outputs) to.push_back(base + offset);
    kernels.mix(type, from, to, averages, count, stream);
  };
  runner.start(std::move(one));
}

}  // namespace

void start_copy_cases(Runner& runner, bool thorough) {
  for (int turn = 0; turn < (thorough ? 200 : 40); ++turn) {
    start_copies(runner, 1 + dice().below(12), turn % 3 == 0, 0);
  }
  for (const std::size_t tensors : {0u, 1u, 113u, 1500u}) start_copies(runner, tensors, false, 64);
}

void start_mix_cases(Runner& runner, bool thorough) {
  for (const DType type : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    dispatch(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (test::is_float<T>) {
        for (int turn = 0; turn < (thorough ? 120 : 24); ++turn) {
          const std::size_t count = any_size() / sizeof(T);
          start_mix<T>(runner, type, 1 + dice().below(12), 80, count, turn % 3, turn % 2 != 0);
        }
        // Averages that need more than the small table has, one thread's worth of shared memory, and one slot.
        start_mix<T>(runner, type, 90, 80, 1000, 2, false);
        start_mix<T>(runner, type, 90, 80, 1000, 0, true);
        start_mix<T>(runner, type, 30, 12, 4100, 0, false);
      }
    });
  }
}

}  // namespace sordino::on_cpu_test
