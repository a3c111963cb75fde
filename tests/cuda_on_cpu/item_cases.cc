// Cases of the comparison of elements, and of samples of them.
#include "cases.h"
#include "kernels/unchanged.h"

namespace sordino::on_cpu_test {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 15, 16, 17, 255, 256, 4095, 4097, 8200};

enum class Types { kFloats, kAll, kBytes };

// Tensors one after the other, at multiples of 8 bytes, as gradients lie in an arena.
std::vector<kernels::Item> random_items(Types types, std::size_t first, std::size_t& bytes) {
  std::vector<kernels::Item> items;
  bytes = 0;
  for (int k = 0; k < 14; ++k) {
    auto type = static_cast<DType>(dice().below(kDTypeCount));
    std::size_t count = k == 0 && first != 0 ? first : kSizes[dice().below(std::size(kSizes))];
    if (types == Types::kFloats) type = static_cast<DType>(static_cast<unsigned>(DType::kFloat16) + dice().below(4));
    // Counters of the tensors begin at all distances from a multiple of 16.
    if (types == Types::kBytes) type = DType::kUInt8, count = 97;
    bytes = (bytes + 7) / 8 * 8;
    items.push_back({bytes, count, type});
    bytes += count * size_of(type);
  }
  return items;
}

// `highest`: counters are below it, so that many are equal. `alike`: old and new values have the same alignment.
void start_items(Runner& runner, Types types, bool alike, std::size_t first, double ratio, unsigned highest) {
  std::size_t bytes = 0;
  const kernels::Items items(random_items(types, first, bytes), ratio);
  Case one("items: " + std::to_string(bytes) + " bytes, ratio " + std::to_string(ratio));
  const std::size_t now = one.add<std::uint8_t>(bytes, 0), before = one.add<std::uint8_t>(bytes, alike ? 0 : 8);
  std::memcpy(one.on_host<std::byte>(before), one.on_host<std::byte>(now), bytes);
  for (std::size_t k = 0; k < bytes / 16; ++k) {
    one.on_host<std::uint8_t>(before)[dice().below(bytes)] = static_cast<std::uint8_t>(dice().next());
  }
  const std::size_t counters = one.add<std::uint8_t>(items.elements(), dice().below(17));
  for (std::size_t k = 0; k < items.elements(); ++k) {
    one.on_host<std::uint8_t>(counters)[k] = static_cast<std::uint8_t>(255 - dice().below(highest));
  }
  const std::size_t tensors = items.rows().size();
  const std::size_t counts = one.add<std::int64_t>(tensors, 0), of_samples = one.add<std::int64_t>(tensors, 8);
  const std::size_t drawn = one.add<std::uint32_t>(items.samples(), 4);
  const std::size_t selected = one.add<std::uint32_t>(items.samples(), 8);
  const std::size_t saved = one.add<std::uint8_t>(items.sample_bytes(), 1);
  const int digits = types == Types::kFloats ? static_cast<int>(dice().below(5)) - 1 : kernels::kExact;
  const bool counting = types == Types::kBytes || dice().below(3) != 0;
  const std::uint64_t key = dice().next();
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    kernels.draw(items, key, base + drawn, stream);
    kernels.save_at(items, base + before, base + drawn, base + saved, stream);
    kernels.unchanged_at(items, base + now, base + saved, base + drawn, base + of_samples, digits, stream);
    kernels.unchanged(items, base + now, base + before, base + counts, digits, counting ? base + counters : nullptr,
                      stream);
    kernels.select(items, base + counters, base + selected, stream);
  };
  runner.start(std::move(one));
}

}  // namespace

void start_item_cases(Runner& runner, bool thorough) {
  for (int turn = 0; turn < (thorough ? 60 : 8); ++turn) {
    const Types types = turn % 2 == 0 ? Types::kFloats : Types::kAll;
    start_items(runner, types, turn % 4 < 2, 0, turn % 3 == 0 ? 1.0 : 0.03, turn % 5 == 1 ? 3 : 256);
  }
  start_items(runner, Types::kBytes, true, 0, 0.1, 256);
  start_items(runner, Types::kBytes, false, 0, 1.0, 5);
  // Several chunks of a row: 64 KiB of counters are one chunk of a selection.
  start_items(runner, Types::kFloats, true, 70'001, 0.05, 256);
  start_items(runner, Types::kAll, false, 200'003, 0.3, 2);
  start_items(runner, Types::kAll, true, (64 << 10) * 2, 0.01, 1);
}

}  // namespace sordino::on_cpu_test
