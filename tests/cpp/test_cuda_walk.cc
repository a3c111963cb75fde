// The CUDA kernels that map elements to elements, run on the host, against the CPU kernels bit for bit.
#include <algorithm>
#include <deque>
#include <string>

#include "check.h"
#include "kernels/cuda/element_ops.h"
#include "kernels/cuda/mix_op.h"
#include "walk_on_host.h"

namespace sordino::test {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 2, 7, 15, 16, 17, 33, 255, 1000, 4097, 20011};

// Counts how often each element is visited, and how many are visited alone.
template <class T, cuda::Accesses kHow>
struct Touch {
  using Element = T;
  using State = cuda::Nothing;
  static constexpr cuda::Accesses kAccesses = kHow;
  template <int kWidth>
  static constexpr int kAhead = kWidth == 1 ? 4 : 3;

  std::uint32_t lists;
  std::vector<int>* seen;
  std::size_t first;  // the first element of `seen`
  std::size_t* alone;

  template <int kWidth>
  void apply(const cuda::Row& row, std::size_t i, std::size_t step, int live, State&) const {
    for (int u = 0; u < live; ++u) {
      const std::uint64_t at = row.words[kHow == cuda::Accesses::kStored] + (i + u * step) * sizeof(T);
      CHECK(at % (kWidth * sizeof(T)) == 0 || kHow == cuda::Accesses::kFixed, "element", i + u * step, "width", kWidth);
      *alone += kWidth == 1;
      for (int e = 0; e < kWidth; ++e) ++seen->at(i + u * step + static_cast<std::size_t>(e) - first);
    }
  }
};

template <class T, cuda::Accesses kHow>
void test_cover() {
  for (const std::size_t count : kSizes) {
    for (std::size_t phase = 0; phase < 16; phase += sizeof(T)) {
      for (const std::size_t other : {std::size_t{0}, phase, 8 + phase}) {
        cuda::Table table(2);
        std::vector<int> seen(count);
        std::size_t alone = 0;
        table.add({4096 + phase, 8192 + other}, count);
        elementwise(table, Touch<T, kHow>{2, &seen, 0, &alone});
        CHECK(std::count(seen.begin(), seen.end(), 1) == std::ptrdiff_t(count), count, phase, other);
        const bool wide = kHow != cuda::Accesses::kSingle && (kHow != cuda::Accesses::kWide || phase == other);
        const std::size_t chunks = (count * sizeof(T) + 4095) / 4096;  // such small calls have chunks of 4 KiB
        CHECK(!wide || alone <= chunks * 31 / sizeof(T), count, phase, other, "alone", alone);
      }
    }
  }
}

// Rows whose number of elements exceeds 32 bits: all chunks are planned, some are walked.
template <class T>
void test_large_rows() {
  constexpr std::size_t kLarge = (std::size_t{1} << 33) + 12345;
  cuda::Table table(1);
  table.add({4096 + sizeof(T)}, 77);
  table.add({4096 + sizeof(T)}, kLarge);
  table.add({4096}, 5);
  const std::uint32_t bytes = cuda::chunk_bytes(table.elements() * sizeof(T));
  CHECK(bytes == 16 << 10 && cuda::chunk_bytes(2 << 20) == 4 << 10 && cuda::chunk_bytes((2 << 20) + 1) == 16 << 10);
  cuda::plan(table, sizeof(T), bytes, [&](const auto& batch, std::uint32_t chunks) {
    const std::size_t chunk = bytes / sizeof(T), wanted = (kLarge + chunk - 1) / chunk;
    CHECK(chunks == 1 + wanted + 1, chunks);
    CHECK(cuda::find_chunk(batch, 0, sizeof(T)).row == 0 && cuda::find_chunk(batch, chunks - 1, sizeof(T)).row == 2);
    for (const std::size_t index : {std::size_t{0}, wanted / 2, wanted - 1}) {
      const cuda::Chunk found = cuda::find_chunk(batch, 1 + index, sizeof(T));
      const std::size_t count = std::min(chunk, kLarge - index * chunk);
      CHECK(found.row == 1 && found.begin == index * chunk && found.count == count, "chunk", index);
      std::vector<int> seen(found.count);
      std::size_t alone = 0;
      const Touch<T, cuda::Accesses::kWide> touch{1, &seen, found.begin, &alone};
      cuda::Nothing nothing;
      for (std::uint32_t thread = 0; thread < cuda::kThreads; ++thread) {
        cuda::walk(batch, 1 + index, thread, cuda::kThreads, touch, nothing);
      }
      CHECK(std::count(seen.begin(), seen.end(), 1) == std::ptrdiff_t(count), "chunk", index);
    }
  });
}

// A table of tensors of all sizes, some of whose destinations are sources, against the CPU kernels.
template <class T>
void test_reduce(DType type, ReduceOp op, std::size_t sources, std::size_t targets, double pre, double post) {
  for (const Phases phases : kPhases) {
    std::deque<Placed<T>> ours, theirs;
    cuda::Table table(sources + targets);
    for (const std::size_t count : kSizes) {
      const bool in_place = random_below(2) != 0;
      std::vector<std::size_t> at(sources + targets);
      for (std::size_t k = 0; k < sources + targets; ++k) {
        at[k] = in_place && k == sources ? at[random_below(sources)] : ours.size();
        if (at[k] != ours.size()) continue;
        ours.push_back(random_placed<T>(count, phase_of(phases, k, sizeof(T))));
        theirs.push_back(ours.back());
      }
      std::vector<const std::byte*> from;
      std::vector<std::byte*> to;
      for (std::size_t k = 0; k < sources + targets; ++k) {
        table.words.push_back(cuda::word(ours[at[k]].data()));
        k < sources ? from.push_back(theirs[at[k]].data()) : to.push_back(theirs[at[k]].data());
      }
      table.counts.push_back(count);
      kernels::reduce(op, type, from, to, count, pre, post);
    }
    const auto lists = static_cast<std::uint32_t>(sources + targets), inputs = static_cast<std::uint32_t>(sources);
    if constexpr (std::is_integral_v<T>) {
      if (pre != 1 || post != 1) {
        elementwise(table, cuda::ReduceScaled<T>{lists, inputs, op, pre, post});
      } else {
        elementwise(table, cuda::Reduce<T>{lists, inputs, op, 1, 1});
      }
    } else {
      using Stage = kernels::cuda::Stage<T>;
      elementwise(table, cuda::Reduce<T>{lists, inputs, op, static_cast<Stage>(pre), static_cast<Stage>(post)});
    }
    for (std::size_t k = 0; k < ours.size(); ++k) {
      CHECK(all_same(ours[k], theirs[k]) && ours[k].guards_hold(), name_of(type), "op", int(op), "sources", sources,
            "count", ours[k].size(), "phases", int(phases), "scales", pre, post);
    }
  }
}

template <class T>
void test_pairs(DType type) {
  for (const Phases phases : kPhases) {
    for (const std::size_t count : kSizes) {
      std::deque<Placed<T>> ours;
      for (std::size_t k = 0; k < 3; ++k) ours.push_back(random_placed<T>(count, phase_of(phases, k, sizeof(T))));
      std::deque<Placed<T>> theirs(ours);
      using Stage = kernels::cuda::Stage<T>;
      cuda::Table table(2);
      table.add({cuda::word(ours[0].data()), cuda::word(ours[1].data())}, count);
      elementwise(table, cuda::Axpby<T>{2, static_cast<Stage>(-2.3), static_cast<Stage>(1.0 / 3)});
      kernels::axpby(type, theirs[0].data(), theirs[1].data(), count, -2.3, 1.0 / 3);
      CHECK(all_same(ours[1], theirs[1]) && ours[1].guards_hold(), name_of(type), count, "phases", int(phases));

      const double rates[] = {0.25};
      cuda::Table weights(3);
      weights.add({cuda::word(ours[0].data()), cuda::word(ours[1].data()), cuda::word(ours[2].data())}, count);
      elementwise(weights, cuda::Lars<T>{3, rates, static_cast<Stage>(1e-2), static_cast<Stage>(0.9), true});
      for (std::size_t i = 0; i < count; ++i) {
        const auto at = [i](const Placed<T>& list) { return to_double(list.get(i)); };
        const double decayed = staged<T>(staged<T>(1e-2) * at(theirs[0]));
        const double d = staged<T>(0.25 * staged<T>(at(theirs[1]) + decayed));
        const double v = staged<T>(staged<T>(staged<T>(0.9) * at(theirs[2])) + d);
        T weight, velocity;
        from_double(v, velocity);
        from_double(staged<T>(at(theirs[0]) - staged<T>(d + staged<T>(staged<T>(0.9) * v))), weight);
        CHECK(same(ours[0].get(i), weight) && same(ours[2].get(i), velocity), name_of(type), count, i);
      }
      for (const Placed<T>& list : ours) CHECK(list.guards_hold(), name_of(type), count);
    }
  }
}

// Random averages of some vectors; some outputs are also inputs.
template <class T>
void test_mix(DType type, std::size_t count, Phases phases) {
  constexpr std::size_t kVectors = 6;
  std::deque<Placed<T>> ours;
  for (std::size_t k = 0; k < 2 * kVectors; ++k) {
    ours.push_back(random_placed<T>(count, phase_of(phases, k, sizeof(T))));
  }
  std::deque<Placed<T>> theirs(ours);
  std::vector<const std::byte*> inputs, our_inputs;
  std::vector<std::byte*> outputs, our_outputs;
  const bool in_place = random_below(3) != 0;
  for (std::size_t k = 0; k < kVectors; ++k) {
    const std::size_t output = in_place ? (k + 1) % kVectors : kVectors + k;
    inputs.push_back(theirs[k].data()), our_inputs.push_back(ours[k].data());
    outputs.push_back(theirs[output].data()), our_outputs.push_back(ours[output].data());
  }
  std::vector<kernels::Average> averages(1 + random_below(kVectors));
  for (std::size_t k = 0; k < kVectors; ++k) {
    if (random_below(4) != 0) averages[random_below(averages.size())].into.push_back(static_cast<int>(k));
  }
  for (kernels::Average& average : averages) {
    for (std::size_t k = random_below(5); k > 0; --k) average.of.push_back(static_cast<int>(random_below(kVectors)));
    average.scale = average.of.size() < 2 ? 1 : 1.0 / static_cast<double>(average.of.size());
  }
  kernels::mix(type, inputs, outputs, averages, count);

  constexpr int kPacks = 4;
  using Mix = cuda::Mix<T, 512, 64, kPacks>;
  Mix mix;
  CHECK(mix.describe(averages));
  mix.lists = 2 * kVectors, mix.inputs = kVectors;
  mix.direct = !kernels::clashes(our_inputs, our_outputs, averages);
  cuda::Table table(2 * kVectors);
  for (const std::byte* input : our_inputs) table.words.push_back(cuda::word(input));
  for (const std::byte* output : our_outputs) table.words.push_back(cuda::word(output));
  table.counts.push_back(count);
  constexpr std::uint32_t kThreads = 64;
  CHECK(mix.slots() == (mix.direct ? 0 : averages.size() * kPacks));
  std::vector<cuda::Quad> waiting(mix.slots() * kThreads);
  cuda::plan_batches<128>(table, sizeof(T), cuda::chunk_bytes(count * sizeof(T)),
                          [&](const auto& batch, std::uint32_t chunks) {
                            for (std::uint32_t block = 0; block < chunks; ++block) {
                              for (std::uint32_t thread = 0; thread < kThreads; ++thread) {
                                typename Mix::State state{waiting.data() + thread, kThreads};
                                cuda::walk(batch, block, thread, kThreads, mix, state);
                              }
                            }
                          });
  for (std::size_t k = 0; k < ours.size(); ++k) {
    CHECK(all_same(ours[k], theirs[k]) && ours[k].guards_hold(), name_of(type), "count", count, "vector", k, "phases",
          int(phases), "direct", mix.direct);
  }
  const std::vector<kernels::Average> many(65, {{0}, {}, 1}), long_one(1, {std::vector<int>(600), {0}, 1});
  CHECK(!mix.describe(many) && !mix.describe(long_one));
}

// Spans of any size and address, into a flat buffer and out of it.
void test_flatten() {
  for (std::size_t shift = 0; shift < 17; ++shift) {
    std::deque<Placed<std::uint8_t>> tensors;
    std::vector<kernels::Span> spans, again;
    std::size_t total = 0;
    for (int k = 0; k < 60; ++k) {
      const std::size_t bytes = k % 7 == 3 ? kSizes[random_below(12)] : random_below(200);
      tensors.push_back(random_placed<std::uint8_t>(bytes, random_below(20)));
      spans.push_back({tensors.back().data(), bytes});
      spans.push_back({nullptr, 0});
      total += bytes;
    }
    Placed<std::uint8_t> flat(total, shift), expected(total);
    elementwise(cuda::copies(spans, flat.data(), true), cuda::Copy{2});
    kernels::flatten(spans, expected.data());
    CHECK(same_bytes(flat, expected) && flat.guards_hold(), "shift", shift);
    std::deque<Placed<std::uint8_t>> copies;
    for (const auto& tensor : tensors) {
      copies.emplace_back(tensor.size(), random_below(20));
      again.push_back({copies.back().data(), tensor.size()});
    }
    elementwise(cuda::copies(again, flat.data(), false), cuda::Copy{2});
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      CHECK(same_bytes(copies[k], tensors[k]) && copies[k].guards_hold(), "shift", shift, "tensor", k);
    }
  }
}

// More rows than one launch takes, and more addresses than one row can have.
void test_many_rows() {
  constexpr std::size_t kRows = 10000;
  Placed<float> x = random_placed<float>(3 * kRows), y = random_placed<float>(3 * kRows), expected = y;
  cuda::Table table(2);
  for (std::size_t row = 0; row < kRows; ++row) {
    table.add({cuda::word(x.data() + 12 * row), cuda::word(y.data() + 12 * row)}, 3 - row % 4);
    kernels::axpby(DType::kFloat32, x.data() + 12 * row, expected.data() + 12 * row, 3 - row % 4, 0.5, 2);
  }
  int launches = 0;
  cuda::plan(table, 4, 4096, [&](const auto& batch, std::uint32_t) { launches += batch.rows > 0; });
  CHECK(launches == 10, launches);
  for (const auto& [tensors, bytes] : {std::pair(112, 4 << 10), std::pair(113, 9 << 10), std::pair(161, 9 << 10),
                                       std::pair(257, 32 << 10), std::pair(1000, 32 << 10)}) {
    cuda::Table some(2);
    for (int row = 0; row < tensors; ++row) some.add({0, 0}, 1);
    cuda::plan(some, 4, 4096, [&](const auto& batch, std::uint32_t) {
      CHECK(batch.rows == std::uint32_t(tensors) && sizeof batch <= std::size_t(bytes) && sizeof batch > bytes * 3 / 4u,
            tensors, sizeof batch);
    });
  }
  elementwise(table, cuda::Axpby<float>{2, 0.5f, 2});
  CHECK(all_same(y, expected) && y.guards_hold());
  cuda::Table wide(4000);
  wide.words.resize(4000);
  wide.counts.push_back(1);
  CHECK_THROWS(UsageError, cuda::plan(wide, 1, 4096, [](const auto&, std::uint32_t) {}));
  Rows rows{3, std::vector<std::byte*>(3), {1}};
  CHECK_THROWS(UsageError, cuda::check_width("axpby", rows, 2));
  CHECK_THROWS(UsageError, cuda::check_floating("axpby", DType::kInt32));
}

int run() {
  using cuda::Accesses;
  test_cover<std::uint8_t, Accesses::kWide>();
  test_cover<std::uint8_t, Accesses::kStored>();
  test_cover<std::uint16_t, Accesses::kWide>();
  test_cover<float, Accesses::kFixed>();
  test_cover<double, Accesses::kWide>();
  test_cover<double, Accesses::kSingle>();
  test_large_rows<std::uint8_t>();
  test_large_rows<Half>();
  test_large_rows<double>();
  constexpr double scales[][2] = {{1, 1}, {1, 0.25}, {1.0 / 3, 1}, {-1.7, 3}};
  for (int code = 0; code < kDTypeCount; ++code) {
    dispatch(DType(code), [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (!std::is_same_v<T, Bool>) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
          for (const auto& [pre, post] : scales) {
            for (const std::size_t sources : {1, 2, 5})
              test_reduce<T>(DType(code), op, sources, 1 + sources / 2, pre, post);
          }
        }
        if constexpr (is_float<T>) {
          test_pairs<T>(DType(code));
          for (const std::size_t count : kSizes) {
            for (const Phases phases : kPhases) {
              for (int time = 0; time < 4; ++time) test_mix<T>(DType(code), count, phases);
            }
          }
        }
      }
    });
  }
  test_flatten();
  test_many_rows();
  return report();
}

}  // namespace
}  // namespace sordino::test

int main() { return sordino::test::run(); }
