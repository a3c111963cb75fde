// kernels/unchanged.h at every level, against loops that define the results.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "kernels/unchanged.h"
#include "kernels_fixture.h"
#include "kernels_reference.h"

namespace sordino::test {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 7, 63, 64, 1003};
constexpr double kRatio = 0.05;

template <class T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// The kernels' comparison of rounded elements, by functions of the C library.
template <class T>
bool same_element(T now, T before, int digits) {
  if (same_bits(now, before)) return true;
  if constexpr (is_float<T>) {
    if (digits < 0) return false;
    const double limit = std::is_same_v<T, double> ? 0x1p52 : 0x1p23, scale = staged<T>(std::pow(10.0, digits));
    const double a = staged<T>(to_double(now) * scale), b = staged<T>(to_double(before) * scale);
    return std::abs(a) < limit && std::abs(b) < limit && std::nearbyint(a) == std::nearbyint(b);
  }
  return false;
}

// Returns the same value, a near one, its negative, a multiple of 1/2, one of similar size, or any other.
template <class T>
T stepped(T value) {
  if (random_below(2)) return value;
  if constexpr (is_float<T>) {
    const std::size_t kind = random_below(5);
    if (kind == 0) from_double(to_double(value) + 1e-4, value);
    if (kind == 1) from_double(-to_double(value), value);
    if (kind == 2) from_double(static_cast<double>(random_below(9)) / 2 - 2, value);
    if (kind == 3) from_double(to_double(value) * 1.5, value);
    if (kind < 4) return value;
  }
  return random_element<T>();
}

// Tensors of all sizes in one piece of memory, before and after a step, at any address.
template <class T>
struct Tensors {
  Tensors(DType type) : now(total()), before(total(), true) {
    std::size_t at = 0;
    for (const std::size_t size : kSizes) {
      items.push_back({at * sizeof(T), size, type});
      at += size;
    }
    for (std::size_t i = 0; i < at; ++i) {
      before.set(i, random_element<T>());
      now.set(i, stepped(before.get(i)));
    }
  }
  static std::size_t total() { return std::accumulate(std::begin(kSizes), std::end(kSizes), std::size_t{0}); }

  std::vector<kernels::Item> items;
  Buffer<T> now, before;
};

template <class T>
void test_unchanged(const std::string& level, DType type, int digits, bool counting) {
  const Tensors<T> tensors(type);
  const kernels::Items items(tensors.items, kRatio);
  Buffer<T> before = tensors.before;
  Buffer<std::int64_t> counts(items.rows().size());
  Buffer<std::uint8_t> counters(items.elements());
  std::vector<std::uint8_t> expected_counters(items.elements());
  for (std::size_t i = 0; i < items.elements(); ++i) {
    const auto seen = static_cast<std::uint8_t>(random_below(2) ? 255 - random_below(2) : random_below(256));
    counters.set(i, seen);
    const bool changed = counting && !same_element(tensors.now.get(i), tensors.before.get(i), digits);
    expected_counters[i] = static_cast<std::uint8_t>(std::min(255, seen + changed));
  }
  kernels::unchanged(items, tensors.now.data(), before.data(), counts.data(), digits,
                     counting ? counters.data() : nullptr);
  std::size_t item = 0;
  for (const auto& row : items.rows()) {
    std::int64_t expected = 0;
    for (std::size_t i = row.first_element; i < row.first_element + row.elements; ++i) {
      expected += same_element(tensors.now.get(i), tensors.before.get(i), digits);
    }
    const auto first = expected_counters.begin() + static_cast<std::ptrdiff_t>(row.first_element);
    const auto last = first + static_cast<std::ptrdiff_t>(row.elements);
    if (counting && std::find(first, last, 255) != last) {
      std::transform(first, last, first, [](std::uint8_t seen) { return static_cast<std::uint8_t>(seen / 2); });
    }
    CHECK(counts.get(item) == expected, level, name_of(type), "digits", digits, "elements", row.elements, "found",
          counts.get(item), "instead of", expected);
    ++item;
  }
  CHECK(std::memcmp(before.data(), tensors.now.data(), items.elements() * sizeof(T)) == 0, level, name_of(type));
  CHECK(equals(counters, expected_counters), level, name_of(type), "digits", digits);
  CHECK(before.guards_hold() && counts.guards_hold() && counters.guards_hold(), level, name_of(type));
}

template <class T>
void test_samples(const std::string& level, DType type, int digits) {
  const Tensors<T> tensors(type);
  const kernels::Items items(tensors.items, kRatio);
  Buffer<std::uint32_t> indices(items.samples());
  Buffer<std::byte> saved(items.sample_bytes());
  Buffer<std::int64_t> counts(items.rows().size());
  kernels::draw(items, random_bits(), indices.data());
  kernels::save_at(items, tensors.before.data(), indices.data(), saved.data());
  kernels::unchanged_at(items, tensors.now.data(), saved.data(), indices.data(), counts.data(), digits);
  std::size_t item = 0;
  for (const auto& row : items.rows()) {
    CHECK(row.samples == std::min<std::size_t>(row.elements, std::max(1.0, std::ceil(kRatio * row.elements))));
    std::int64_t expected = 0;
    for (std::size_t k = 0; k < row.samples; ++k) {
      const std::size_t i = indices.get(row.first_sample + k);
      // There is one sample in each of equal stretches; an element on a border may belong to either.
      const double stretch = static_cast<double>(row.elements) / row.samples;
      CHECK(i < row.elements && i + 1 > k * stretch && i < (k + 1) * stretch, level, "sample", k, "is", i);
      const T was = tensors.before.get(row.first_element + i);
      CHECK(std::memcmp(saved.data() + row.first_saved + k * sizeof(T), &was, sizeof(T)) == 0, level, name_of(type));
      expected += same_element(tensors.now.get(row.first_element + i), was, digits);
    }
    CHECK(counts.get(item) == expected, level, name_of(type), "digits", digits, "samples", row.samples, "found",
          counts.get(item), "instead of", expected);
    ++item;
  }
  CHECK(indices.guards_hold() && saved.guards_hold() && counts.guards_hold(), level, name_of(type));
}

// Samples are compared in blocks. There are several, and the last one is smaller.
void test_many_samples() {
  constexpr std::size_t kElements = 23'000;
  Buffer<float> now(kElements), before(kElements, true);
  for (std::size_t i = 0; i < kElements; ++i) {
    before.set(i, static_cast<float>(i));
    now.set(i, static_cast<float>(i) + (i % 3 == 0 || i > kElements / 2));
  }
  const kernels::Items items({{0, kElements, DType::kFloat32}}, kRatio);
  Buffer<std::uint32_t> indices(items.samples());
  Buffer<std::byte> saved(items.sample_bytes());
  Buffer<std::int64_t> counts(1);
  kernels::draw(items, 3, indices.data());
  kernels::save_at(items, before.data(), indices.data(), saved.data());
  kernels::unchanged_at(items, now.data(), saved.data(), indices.data(), counts.data(), kernels::kExact);
  std::int64_t expected = 0;
  for (std::size_t k = 0; k < items.samples(); ++k) expected += now.get(indices.get(k)) == before.get(indices.get(k));
  CHECK(counts.get(0) == expected, counts.get(0), "instead of", expected);
}

// The drawn samples depend only on the key and the number of the item.
void test_draws_differ() {
  constexpr std::size_t kElements = 10'000;
  const kernels::Items items({{0, kElements, DType::kFloat32}, {0, kElements, DType::kFloat32}}, kRatio);
  const std::size_t samples = items.rows()[0].samples;
  const auto drawn = [&](std::uint64_t key) {
    Buffer<std::uint32_t> indices(items.samples());
    kernels::draw(items, key, indices.data());
    std::vector<std::uint32_t> found;
    for (std::size_t i = 0; i < items.samples(); ++i) found.push_back(indices.get(i));
    return found;
  };
  const auto same = [&](const std::vector<std::uint32_t>& a, std::size_t first, const std::vector<std::uint32_t>& b) {
    std::size_t count = 0;
    for (std::size_t k = 0; k < samples; ++k) count += a[k] == b[first + k];
    return count;
  };
  const auto one = drawn(7), other = drawn(8);
  CHECK(one == drawn(7));
  // Each sample is from a stretch of 20 elements, so by chance 25 of 500 are the same, plus or minus 5.
  CHECK(same(one, samples, one) < samples / 8, same(one, samples, one));
  CHECK(same(one, 0, other) < samples / 8, same(one, 0, other));
}

// `values` is the number of different counters, and `highest` is the highest one.
void test_select(double ratio, std::size_t values, std::size_t highest) {
  std::vector<kernels::Item> tensors;
  for (const std::size_t size : kSizes) tensors.push_back({0, size, DType::kFloat32});
  const kernels::Items items(tensors, ratio);
  Buffer<std::uint8_t> counters(items.elements(), false);
  for (std::size_t i = 0; i < items.elements(); ++i) {
    counters.set(i, static_cast<std::uint8_t>(highest - random_below(values)));
  }
  Buffer<std::uint32_t> indices(items.samples());
  kernels::select(items, counters.data(), indices.data());
  for (const auto& row : items.rows()) {
    std::vector<std::uint32_t> expected(row.elements), found(row.samples);
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(), [&](std::uint32_t a, std::uint32_t b) {
      return counters.get(row.first_element + a) > counters.get(row.first_element + b);
    });
    expected.resize(row.samples);
    std::sort(expected.begin(), expected.end());
    for (std::size_t k = 0; k < row.samples; ++k) found[k] = indices.get(row.first_sample + k);
    CHECK(found == expected, "ratio", ratio, "values", values, "up to", highest, "elements", row.elements);
  }
  CHECK(indices.guards_hold());
}

void test_errors() {
  std::byte memory[64] = {};
  for (const double ratio : {0.0, -1.0, 1.01, std::nan("")}) CHECK_THROWS(UsageError, kernels::Items({}, ratio));
  CHECK_THROWS(UsageError, kernels::Items({{0, std::size_t{1} << 32, DType::kInt8}}, 1));
  kernels::Items({{0, (std::size_t{1} << 32) - 1, DType::kInt8}}, 1);
  const kernels::Items integer({{0, 1, DType::kInt32}}, 1), floating({{0, 1, DType::kFloat32}}, 1);
  CHECK_THROWS(UsageError, kernels::unchanged(integer, memory, memory, memory, 3, nullptr));
  CHECK_THROWS(UsageError, kernels::unchanged_at(integer, memory, memory, memory, memory, 0));
  CHECK_THROWS(UsageError, kernels::unchanged(floating, memory, memory, memory, 16, nullptr));
  const kernels::Items none({}, 0.5);
  kernels::unchanged(none, nullptr, nullptr, nullptr, 15, nullptr);
  kernels::draw(none, 1, nullptr);
  kernels::select(none, nullptr, nullptr);
  kernels::save_at(none, nullptr, nullptr, nullptr);
  kernels::unchanged_at(none, nullptr, nullptr, nullptr, nullptr, 15);
}

int run() {
  for (const char* level : {"baseline", "avx2", "avx512"}) {
    try {
      kernels::set_level(level);
    } catch (const UsageError&) {
      continue;
    }
    std::cout << level << '\n';
    for (int code = 0; code < kDTypeCount; ++code) {
      dispatch(DType(code), [&](auto tag) {
        using T = typename decltype(tag)::type;
        for (const int digits : {kernels::kExact, 0, 1, 3, 7, 15}) {
          if (digits >= 0 && !is_float<T>) continue;
          for (int time = 0; time < 20; ++time) {
            test_unchanged<T>(level, DType(code), digits, time % 2);
            test_samples<T>(level, DType(code), digits);
          }
        }
      });
    }
  }
  for (const double ratio : {1e-3, 0.1, 0.5, 1.0}) {
    for (const std::size_t values : {1, 2, 5, 100}) {
      for (const std::size_t highest : {255, 130, 128, 127, 99}) test_select(ratio, values, highest);
    }
  }
  test_draws_differ();
  test_many_samples();
  test_errors();
  return report();
}

}  // namespace
}  // namespace sordino::test

int main() { return sordino::test::run(); }
