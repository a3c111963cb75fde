// Cases of the comparison of elements, and of samples of them.
#include "cases.h"
#include "kernels/unchanged.h"

namespace sordino::on_cpu_test {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 15, 16, 17, 255, 256, 4095, 4097, 8200};

// Tensors one after the other, at multiples of 8 bytes, as gradients lie in an arena.
std::vector<kernels::Item> random_items(bool floats, std::size_t first, std::size_t& bytes) {
  std::vector<kernels::Item> items;
  bytes = 0;
  for (int k = 0; k < 14; ++k) {
    const int code = floats ? static_cast<int>(DType::kFloat16) + static_cast<int>(dice().below(4))
                            : static_cast<int>(dice().below(kDTypeCount));
    const auto type = static_cast<DType>(code);
    const std::size_t count = k == 0 && first != 0 ? first : kSizes[dice().below(std::size(kSizes))];
    bytes = (bytes + 7) / 8 * 8;
    items.push_back({bytes, count, type});
    bytes += count * size_of(type);
  }
  return items;
}

// `highest`: counters are below it, so that many are equal.
void start_items(Runner& runner, bool floats, std::size_t first, double ratio, unsigned highest) {
  std::size_t bytes = 0;
  const kernels::Items items(random_items(floats, first, bytes), ratio);
  Case one("items: " + std::to_string(bytes) + " bytes, ratio " + std::to_string(ratio));
  const std::size_t now = one.add<std::uint8_t>(bytes, 0), before = one.add<std::uint8_t>(bytes, 8);
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
  const int digits = floats ? static_cast<int>(dice().below(5)) - 1 : kernels::kExact;
  const bool counting = dice().below(3) != 0;
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
    const bool floats = turn % 2 == 0;
    start_items(runner, floats, 0, turn % 3 == 0 ? 1.0 : 0.03, turn % 5 == 1 ? 3 : 256);
  }
  // Several chunks of a row: 64 KiB of counters are one chunk of a selection.
  start_items(runner, true, 70'001, 0.05, 256);
  start_items(runner, false, 200'003, 0.3, 2);
  start_items(runner, false, (64 << 10) * 2, 0.01, 1);
}

}  // namespace sordino::on_cpu_test
