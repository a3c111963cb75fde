// Integers times a factor, at every level: all values of 8 and 16 bits, and the extremes and some others of larger
// types, against the product in double (kernels_reference.h).
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "kernels_fixture.h"
#include "kernels_reference.h"

namespace sordino::test {
namespace {

// If a product is near an integer, its truncation depends on the last bits of the factor. With some factors just below
// a fraction, such as the one below 0.2, some products round up to an integer and others do not.
std::vector<double> factors() {
  std::vector<double> found = {0,   5e-324, 1e-310, 1e-300, 1e-9,       1e-5, 1e-3,     0.1f, 0.7f, 0.99,
                               3.7, 1e6,    1e19,   -1e19,  4294967296, NAN,  INFINITY, -0.0, -1,   -INFINITY};
  for (const double fraction : {1 / 2., 1 / 3., 1 / 5., 1 / 7., 1 / 10., 1 / 49., 1 / 255., 1 / 32767., 2 / 3., -1 / 3.,
                                -4 / 5., 127 / 255., 65534 / 65535., 1., 4 / 3., 255.}) {
    const double below = std::nextafter(fraction, 0), above = std::nextafter(fraction, 2 * fraction);
    found.insert(found.end(), {std::nextafter(below, 0), below, fraction, above});
    for (const double distance : {0x1p-50, 0x1p-33, 0x1p-31, 0x1p-17}) {
      found.insert(found.end(), {fraction * (1 - distance), fraction * (1 + distance)});
    }
  }
  return found;
}

// Returns all values of a type of up to 16 bits, or 1000 random values of a larger type.
template <class T>
std::vector<T> all_values() {
  if constexpr (sizeof(T) > 2) {
    std::vector<T> values(1000);
    std::generate(values.begin(), values.end(), random_element<T>);
    return values;
  } else {
    std::vector<T> values(std::size_t{1} << (8 * sizeof(T)));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(i);
    return values;
  }
}

// Tests with each value once, which is too few values for fixed point, and more than four times, which is enough.
template <class T>
void test_factors(const std::vector<std::string>& levels, DType type) {
  const std::vector<T> values = all_values<T>();
  const std::size_t many = 4 * values.size() + 13;
  Buffer<T> input(many), output(many);
  std::vector<T> expected(many);
  for (std::size_t i = 0; i < many; ++i) input.set(i, values[i % values.size()]);
  for (const double factor : factors()) {
    for (std::size_t i = 0; i < many; ++i) {
      expected[i] = i < values.size() ? scaled_integer(values[i], factor) : expected[i - values.size()];
    }
    for (const std::string& level : levels) {
      kernels::set_level(level);
      for (const std::size_t count : {values.size(), many}) {
        const std::byte* const from = input.data();
        std::byte* const to = output.data();
        std::memset(to, 0x5a, many * sizeof(T));
        kernels::reduce(ReduceOp::kSum, type, {&from, 1}, {&to, 1}, count, 1, factor);
        CHECK(std::memcmp(to, expected.data(), count * sizeof(T)) == 0, level, name_of(type), "factor", factor, "count",
              count);
      }
    }
  }
  CHECK(output.guards_hold(), name_of(type));
}

// Tests two factors, in place, with one source and with several.
template <class T>
void test_both_factors(const std::vector<std::string>& levels, DType type) {
  constexpr double kPre = 1 / 3., kPost = -0.3;
  const std::size_t many = 4 * all_values<T>().size() + 13;
  for (const std::size_t sources : {1, 3}) {
    std::vector<Buffer<T>> inputs;
    for (std::size_t k = 0; k < sources; ++k) inputs.push_back(random_buffer<T>(many));
    std::vector<T> expected(many);
    for (std::size_t i = 0; i < many; ++i) {
      const auto at = [&](int k) { return inputs[static_cast<std::size_t>(k)].get(i); };
      expected[i] = reduce_one<T>(ReduceOp::kSum, static_cast<int>(sources), at, kPre, kPost);
    }
    for (const std::string& level : levels) {
      std::vector<Buffer<T>> data = inputs;
      std::vector<std::byte*> places;
      for (Buffer<T>& one : data) places.push_back(one.data());
      const std::vector<const std::byte*> from(places.begin(), places.end());
      kernels::set_level(level);
      kernels::reduce(ReduceOp::kSum, type, from, places, many, kPre, kPost);
      for (const Buffer<T>& one : data) {
        CHECK(equals(one, expected) && one.guards_hold(), level, name_of(type), "sources", sources);
      }
    }
  }
}

int run() {
  std::vector<std::string> levels;
  for (const char* level : {"baseline", "avx2", "avx512"}) {
    try {
      kernels::set_level(level);
      levels.push_back(level);
      std::cout << level << '\n';
    } catch (const UsageError&) {
    }
  }
  for (int code = static_cast<int>(DType::kUInt8); code <= static_cast<int>(DType::kInt64); ++code) {
    dispatch(DType(code), [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (std::is_integral_v<T>) {
        test_factors<T>(levels, DType(code));
        test_both_factors<T>(levels, DType(code));
      }
    });
  }
  return report();
}

}  // namespace
}  // namespace sordino::test

int main() { return sordino::test::run(); }
