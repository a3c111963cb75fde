// The CUDA kernels that add up, compare and select, run on the host, against the CPU kernels.
#include <array>
#include <deque>
#include <numeric>

#include "check.h"
#include "kernels/cuda/items_plan.h"
#include "kernels/cuda/select_ops.h"
#include "kernels/cuda/unchanged_ops.h"
#include "walk_on_host.h"

namespace sordino::test {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 7, 15, 16, 17, 63, 64, 1003, 20011};

bool close(double a, double b, double size) { return std::abs(a - b) <= 1e-13 * size; }

template <class T>
void test_sums(DType type) {
  std::vector<std::vector<double>> of_phases;
  for (const Phases phases : kPhases) {
    std::vector<Placed<T>> lists;
    cuda::Table pairs(2), singles(1);
    for (const std::size_t count : kSizes) {
      for (std::size_t k = 0; k < 2; ++k) {
        lists.emplace_back(count, phase_of(phases, k, sizeof(T)));
        for (std::size_t i = 0; i < count; ++i) {
          T value;
          from_double(static_cast<double>((i * 7919 + k * 31) % 2001) / 7 - 140, value);
          lists.back().set(i, value);
        }
      }
    }
    for (std::size_t k = 0; k < lists.size(); k += 2) {
      pairs.add({cuda::word(lists[k].data()), cuda::word(lists[k + 1].data())}, lists[k].size());
      singles.add({cuda::word(lists[k].data())}, lists[k].size());
    }
    const std::size_t rows = std::size(kSizes);
    std::vector<double> results(5 * rows, -1);
    sums(pairs, cuda::SumUp<T, cuda::DotSums>{}, cuda::StoreSums<cuda::DotSums>{results.data()});
    sums(pairs, cuda::SumUp<T, cuda::DistanceSum>{}, cuda::StoreSums<cuda::DistanceSum>{results.data() + 3 * rows});
    sums(singles, cuda::SumUp<T, cuda::SquareSum>{}, cuda::StoreNorm{results.data() + 4 * rows});
    for (std::size_t row = 0; row < rows; ++row) {
      const std::byte *x = lists[2 * row].data(), *y = lists[2 * row + 1].data();
      const kernels::Dots dots = kernels::dots(type, x, y, kSizes[row]);
      const double apart = kernels::squared_distance(type, x, y, kSizes[row]);
      CHECK(close(results[3 * row], dots.xx, dots.xx) && close(results[3 * row + 2], dots.yy, dots.yy), kSizes[row]);
      CHECK(close(results[3 * row + 1], dots.xy, dots.xx + dots.yy), name_of(type), kSizes[row]);
      CHECK(close(results[3 * rows + row], apart, apart), name_of(type), kSizes[row]);
      CHECK(close(results[4 * rows + row], std::sqrt(dots.xx), std::sqrt(dots.xx)), name_of(type), kSizes[row]);
    }
    cuda::Table alone(1);
    alone.add({singles.words.back()}, singles.counts.back());
    double norm = -1;
    sums(alone, cuda::SumUp<T, cuda::SquareSum>{}, cuda::StoreNorm{&norm});
    CHECK(norm == results.back(), "whatever else is in the call", name_of(type));
    of_phases.push_back(results);
  }
  CHECK(of_phases[0] == of_phases[1] && of_phases[0] == of_phases[2], "wherever they lie", name_of(type));
}

template <class T>
T near(T value) {
  if (random_below(2)) return value;
  if constexpr (is_float<T>) {
    if (random_below(2)) from_double(to_double(value) + 1e-4, value);
    return value;
  } else {
    return random_element<T>();
  }
}

// Items of one type, back to back, all compared as `T`.
template <class T, class As>
void test_unchanged(DType type, int digits, bool counting, Phases phases) {
  std::vector<kernels::Item> tensors;
  std::size_t total = 0;
  for (const std::size_t size : kSizes) {
    tensors.push_back({total * sizeof(T), size, type});
    total += size;
  }
  const kernels::Items items(tensors, 0.03);
  Placed<T> before = random_placed<T>(total, phase_of(phases, 0, sizeof(T)));
  Placed<T> now(total, phase_of(phases, 1, sizeof(T)));
  for (std::size_t i = 0; i < total; ++i) now.set(i, near(before.get(i)));
  Placed<std::uint8_t> seen = random_placed<std::uint8_t>(total, random_below(5));
  for (std::size_t i = items.rows().back().first_element; i < total; ++i) seen.set(i, 100);  // never full
  Placed<T> their_before(before);
  Placed<std::uint8_t> their_seen(seen);
  Placed<std::int64_t> counts(std::size(kSizes)), their_counts(counts);
  kernels::unchanged(items, now.data(), their_before.data(), their_counts.data(), digits,
                     counting ? their_seen.data() : nullptr);

  const double scale = kernels::scale_of(digits);
  std::vector<std::uint8_t> full(std::size(kSizes));
  const auto at = [](Placed<std::int64_t>& numbers) { return reinterpret_cast<std::int64_t*>(numbers.data()); };
  cuda::by_type(items, digits >= 0, [&](auto tag, const std::vector<std::size_t>& chosen) {
    using Found = typename decltype(tag)::type;
    CHECK((std::is_same_v<Found, As>) && chosen.size() == std::size(kSizes), name_of(type));
    if constexpr (std::is_same_v<Found, As>) {
      std::byte* counters = counting ? seen.data() : nullptr;
      sums(cuda::comparisons(items, chosen, now.data(), before.data(), counters), cuda::Compare<As>{2, scale},
           cuda::StoreCounts{at(counts), counting ? full.data() : nullptr, 3});
      if (counting) elementwise(cuda::counted(items, chosen, counters), cuda::Age{1, full.data()});
    }
  });
  CHECK(same_bytes(counts, their_counts) && counts.guards_hold(), name_of(type), digits, int(phases));
  CHECK(same_bytes(before, their_before) && before.guards_hold(), name_of(type), digits, int(phases));
  CHECK(same_bytes(seen, their_seen) && seen.guards_hold(), name_of(type), digits, int(phases));
  CHECK(!counting || (full[9] == 0 && full[8] == 1), "halved, and not");

  Placed<std::uint32_t> indices(items.samples()), their_indices(items.samples());
  kernels::draw(items, 5, their_indices.data());
  elementwise(cuda::draws(items, 5, indices.data()), cuda::Draw{});
  CHECK(same_bytes(indices, their_indices) && indices.guards_hold(), name_of(type));
  Placed<std::uint8_t> saved(items.sample_bytes(), 1), their_saved(saved);  // not aligned to the elements
  kernels::save_at(items, their_before.data(), indices.data(), their_saved.data());
  cuda::by_type(items, false, [&](auto tag, const std::vector<std::size_t>& chosen) {
    using Found = typename decltype(tag)::type;
    if constexpr (std::is_unsigned_v<Found>) {
      elementwise(cuda::samples(items, chosen, their_before.data(), indices.data(), saved.data()),
                  cuda::SaveAt<Found>{});
    }
  });
  CHECK(same_bytes(saved, their_saved) && saved.guards_hold(), name_of(type));
  for (std::size_t i = 0; i < total; ++i) now.set(i, near(now.get(i)));
  kernels::unchanged_at(items, now.data(), saved.data(), indices.data(), their_counts.data(), digits);
  std::vector<std::size_t> all(std::size(kSizes));
  std::iota(all.begin(), all.end(), 0);
  sums(cuda::samples(items, all, now.data(), indices.data(), saved.data()), cuda::CompareAt<As>{scale},
       cuda::StoreCounts{at(counts), nullptr, 3});
  CHECK(same_bytes(counts, their_counts) && counts.guards_hold(), name_of(type), digits);
}

// The same as select.cu with loops for the sums and scans of blocks, in chunks of this many bytes.
void select_on_host(const kernels::Items& items, const std::byte* counters, const std::byte* indices,
                    std::uint32_t chunk_bytes) {
  constexpr std::uint32_t kSelecting = 16;
  cuda::plan(cuda::selections(items, counters, indices), 1, chunk_bytes, [&](const auto& batch, std::uint32_t chunks) {
    std::vector<std::array<std::uint64_t, cuda::kBins>> bins(batch.rows);
    std::vector<cuda::Taken> taken(chunks, {0, 0});
    const auto each = [&](const auto& visit) {
      for (std::uint32_t block = 0; block < chunks; ++block) {
        const cuda::Chunk chunk = cuda::find_chunk(batch, block, 1);
        const cuda::Row row{batch.row(chunk.row), batch.first_row + chunk.row};
        cuda::Cut cut{0, 0};
        std::uint64_t above = 0;
        for (int counter = cuda::kBins - 1; counter >= 0; --counter) {
          const std::uint64_t times = bins[chunk.row][static_cast<std::size_t>(counter)];
          if (!cuda::is_lowest(times, above, row.words[2])) {
            above += times;
            continue;
          }
          cut = {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(row.words[2] - above)};
          break;
        }
        visit(block, chunk, row, cut);
      }
    };
    each([&](std::uint32_t, const cuda::Chunk& chunk, const cuda::Row& row, const cuda::Cut&) {
      for (std::uint32_t thread = 0; thread < kSelecting; ++thread) {
        cuda::count_counters(row, chunk.begin, chunk.begin + chunk.count, thread, kSelecting,
                             [&](std::uint32_t counter, std::uint32_t times) { bins[chunk.row][counter] += times; });
      }
    });
    each([&](std::uint32_t block, const cuda::Chunk& chunk, const cuda::Row& row, const cuda::Cut& cut) {
      const std::uint64_t end = chunk.begin + chunk.count;
      for (std::uint64_t at = chunk.begin; at < end; at += cuda::kWidest) {
        taken[block].add(cuda::taken_of(cuda::load_sixteen(row, at, end), cut));
      }
    });
    each([&](std::uint32_t block, const cuda::Chunk& chunk, const cuda::Row& row, const cuda::Cut& cut) {
      cuda::Taken before{0, 0};
      for (std::uint64_t k = batch.chunks_before(chunk.row); k < block; ++k) before.add(taken[k]);
      const std::uint64_t end = chunk.begin + chunk.count;
      for (std::uint64_t at = chunk.begin; at < end; at += cuda::kWidest) {
        const cuda::Sixteen found = cuda::load_sixteen(row, at, end);
        cuda::write_taken(row, found, cut, before);
        before.add(cuda::taken_of(found, cut));
      }
    });
    for (std::uint32_t row = 0; row < batch.rows; ++row) {
      const std::uint64_t before = batch.row(row)[3];
      CHECK(std::accumulate(bins[row].begin(), bins[row].end(), std::uint64_t{0}) == batch.count(row) - before);
    }
  });
}

void test_select(double ratio, std::size_t values, std::size_t highest) {
  std::vector<kernels::Item> tensors;
  for (const std::size_t size : kSizes) tensors.push_back({0, size, DType::kFloat32});
  const kernels::Items items(tensors, ratio);
  Placed<std::uint8_t> counters(items.elements(), random_below(16));
  for (std::size_t i = 0; i < counters.size(); ++i) {
    counters.set(i, static_cast<std::uint8_t>(highest - random_below(values)));
  }
  Placed<std::uint32_t> expected(items.samples());
  kernels::select(items, counters.data(), expected.data());
  for (const std::uint32_t chunk : {cuda::kSelectChunk, 1u << 10}) {
    Placed<std::uint32_t> indices(items.samples());
    select_on_host(items, counters.data(), indices.data(), chunk);
    CHECK(same_bytes(indices, expected) && indices.guards_hold(), "ratio", ratio, "values", values, "up to", highest,
          "chunks of", chunk);
  }
}

int run() {
  for (const Phases phases : kPhases) {
    for (const bool counting : {false, true}) {
      for (const int digits : {kernels::kExact, 0, 3}) {
        const bool exact = digits < 0;
        if (exact) {
          test_unchanged<std::uint8_t, std::uint8_t>(DType::kUInt8, digits, counting, phases);
          test_unchanged<std::int16_t, std::uint16_t>(DType::kInt16, digits, counting, phases);
          test_unchanged<std::int32_t, std::uint32_t>(DType::kInt32, digits, counting, phases);
          test_unchanged<Half, std::uint16_t>(DType::kFloat16, digits, counting, phases);
          test_unchanged<double, std::uint64_t>(DType::kFloat64, digits, counting, phases);
        } else {
          test_unchanged<Half, Half>(DType::kFloat16, digits, counting, phases);
          test_unchanged<BFloat16, BFloat16>(DType::kBFloat16, digits, counting, phases);
          test_unchanged<float, float>(DType::kFloat32, digits, counting, phases);
          test_unchanged<double, double>(DType::kFloat64, digits, counting, phases);
        }
      }
    }
  }
  test_sums<Half>(DType::kFloat16);
  test_sums<BFloat16>(DType::kBFloat16);
  test_sums<float>(DType::kFloat32);
  test_sums<double>(DType::kFloat64);
  for (const double ratio : {1e-3, 0.1, 0.5, 1.0}) {
    for (const std::size_t values : {1, 2, 5, 100}) {
      for (const std::size_t highest : {255, 130, 99}) test_select(ratio, values, highest);
    }
  }
  return report();
}

}  // namespace
}  // namespace sordino::test

int main() { return sordino::test::run(); }
