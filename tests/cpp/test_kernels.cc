// Every kernel, element type, operation and level against kernels_reference.h, bit for bit.
#include <array>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "kernels_fixture.h"
#include "kernels_reference.h"

namespace sordino::test {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 4097};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

std::vector<std::string> available_levels() {
  std::vector<std::string> levels;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    try {
      kernels::set_level(name);
      levels.push_back(name);
    } catch (const UsageError&) {
    }
  }
  return levels;
}

// One reduction at every level; a random half of the destinations are sources.
template <class T>
void check_reduce(const std::vector<std::string>& levels, DType type, ReduceOp op, int sources, int destinations,
                  std::size_t count, double pre, double post) {
  std::vector<Buffer<T>> inputs;
  for (int k = 0; k < sources; ++k) inputs.push_back(random_buffer<T>(count, false));
  std::vector<T> expected(count);
  for (std::size_t i = 0; i < count; ++i) {
    expected[i] = reduce_one<T>(op, sources, [&](int k) { return inputs[k].get(i); }, pre, post);
  }
  for (const std::string& level : levels) {
    std::vector<Buffer<T>> outputs;
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    for (int k = 0; k < destinations; ++k) outputs.emplace_back(count);
    for (Buffer<T>& output : outputs) to.push_back(output.data());
    for (const Buffer<T>& input : inputs) from.push_back(input.data());
    const std::size_t shift = random_below(sources);
    for (int k = 0; k < destinations && k < sources; ++k) {
      const std::size_t source = (k + shift) % sources;
      if (random_bits() & 1) {
        if (count) std::memcpy(to[k], from[source], count * sizeof(T));
        from[source] = to[k];
      }
    }
    kernels::set_level(level);
    kernels::reduce(op, type, from, to, count, pre, post);
    for (const Buffer<T>& output : outputs) {
      CHECK(equals(output, expected), level, name_of(type), "op", int(op), "sources", sources, "destinations",
            destinations, "count", count, "pre", pre, "post", post);
      CHECK(output.guards_hold(), level, name_of(type), "op", int(op), "count", count);
    }
  }
}

template <class T>
void test_reduce(const std::vector<std::string>& levels, DType type) {
  constexpr double scales[][2] = {{1, 1}, {1, 0.25}, {1.0 / 3, 1}, {-1.7, 3}, {1e30, 1}, {1, -1e-6}};
  for (ReduceOp op : kOps) {
    for (const auto& [pre, post] : scales) {
      for (std::size_t count : kSizes) {
        for (int sources = 1; sources <= 9; ++sources) {
          check_reduce<T>(levels, type, op, sources, 1 + random_below(4), count, pre, post);
        }
      }
    }
    for (int sources = 1; sources <= 9; ++sources) {
      for (int destinations = 1; destinations <= 4; ++destinations) {
        check_reduce<T>(levels, type, op, sources, destinations, 1500, 1, 1);
        check_reduce<T>(levels, type, op, sources, destinations, 1500, 1, 1.0 / sources);
      }
    }
  }
  check_reduce<T>(levels, type, ReduceOp::kSum, 2, 1, 257, 1, NAN);
  check_reduce<T>(levels, type, ReduceOp::kSum, 2, 1, 257, INFINITY, 1);
}

template <class T>
void test_scale(const std::vector<std::string>& levels, DType type) {
  for (double factor : {1.0, 0.5, -1.0, 2.0, -3.0, 1.0 / 3, 1e19, -1e19}) {
    for (std::size_t count : kSizes) {
      const Buffer<T> input = random_buffer<T>(count);
      std::vector<T> expected(count);
      for (std::size_t i = 0; i < count; ++i) {
        expected[i] = reduce_one<T>(ReduceOp::kSum, 1, [&](int) { return input.get(i); }, factor, 1);
      }
      for (const std::string& level : levels) {
        Buffer<T> data = input;
        kernels::set_level(level);
        kernels::scale(type, data.data(), count, factor);
        CHECK(equals(data, expected) && data.guards_hold(), level, name_of(type), "factor", factor, "count", count);
      }
    }
  }
}

template <class T>
void test_axpby(const std::vector<std::string>& levels, DType type) {
  constexpr double factors[][2] = {{1, 1}, {0.5, 0.5}, {-2.3, 1}, {1, 1.0 / 3}, {0, 1}, {1e-3, 1e3}};
  for (const auto& [a, b] : factors) {
    for (std::size_t count : kSizes) {
      const Buffer<T> x = random_buffer<T>(count, false), y = random_buffer<T>(count);
      std::vector<T> expected(count), doubled(count);
      for (std::size_t i = 0; i < count; ++i) {
        expected[i] = axpby_one(x.get(i), y.get(i), a, b);
        doubled[i] = axpby_one(y.get(i), y.get(i), a, b);
      }
      for (const std::string& level : levels) {
        Buffer<T> result = y, self = y;
        kernels::set_level(level);
        kernels::axpby(type, x.data(), result.data(), count, a, b);
        kernels::axpby(type, self.data(), self.data(), count, a, b);
        CHECK(equals(result, expected) && result.guards_hold(), level, name_of(type), a, b, "count", count);
        CHECK(equals(self, doubled) && self.guards_hold(), level, name_of(type), a, b, "count", count);
      }
    }
  }
}

bool close(double got, long double expected, long double magnitude) {
  return std::abs(got - expected) <= 1e-13L * magnitude;
}

template <class T>
void test_dots(const std::vector<std::string>& levels, DType type) {
  for (std::size_t count : kSizes) {
    Buffer<T> x(count, false), y(count, false);
    long double xx = 0, xy = 0, yy = 0, magnitude = 0, apart = 0;
    for (std::size_t i = 0; i < count; ++i) {
      T vx, vy;
      from_double(static_cast<double>(random_below(2001)) / 7 - 140, vx);
      from_double(static_cast<double>(random_below(2001)) / 11 - 90, vy);
      x.set(i, vx);
      y.set(i, vy);
      const long double dx = to_double(vx), dy = to_double(vy);
      xx += dx * dx, xy += dx * dy, yy += dy * dy, magnitude += std::abs(dx * dy), apart += (dx - dy) * (dx - dy);
    }
    kernels::Dots first = {};
    for (const std::string& level : levels) {
      kernels::set_level(level);
      const kernels::Dots got = kernels::dots(type, x.data(), y.data(), count);
      CHECK(close(got.xx, xx, xx) && close(got.xy, xy, magnitude) && close(got.yy, yy, yy), level, name_of(type),
            count);
      if (level == levels.front()) first = got;
      CHECK(std::memcmp(&got, &first, sizeof got) == 0, level, name_of(type), count);
      CHECK(close(kernels::squared_distance(type, x.data(), y.data(), count), apart, apart), level, name_of(type),
            count);
      CHECK(kernels::squared_distance(type, x.data(), x.data(), count) == 0, level, name_of(type), count);
    }
    if (count == 0) continue;
    T nan;
    from_double(NAN, nan);
    x.set(count - 1, nan);
    for (const std::string& level : levels) {
      kernels::set_level(level);
      const kernels::Dots got = kernels::dots(type, x.data(), y.data(), count);
      CHECK(std::isnan(got.xx) && std::isnan(got.xy) && !std::isnan(got.yy), level, name_of(type), count);
    }
  }
}

// All 65,536 values of a 16-bit type through decode and encode: the same bits, NaNs with the quiet bit set.
template <class T>
void test_every_value(const std::vector<std::string>& levels, DType type, std::uint16_t quiet) {
  Buffer<T> input(65536);
  for (unsigned i = 0; i < 65536; ++i) input.set(i, T{static_cast<std::uint16_t>(i)});
  for (const std::string& level : levels) {
    Buffer<T> output(65536);
    const std::array<const std::byte*, 2> from = {input.data(), input.data()};
    const std::array<std::byte*, 1> to = {output.data()};
    kernels::set_level(level);
    kernels::reduce(ReduceOp::kMax, type, from, to, 65536, 1, 1);
    for (unsigned i = 0; i < 65536; ++i) {
      const bool nan = std::isnan(to_double(input.get(i)));
      CHECK(output.get(i).bits == (nan ? i | quiet : i), level, name_of(type), "bits", i, "became", output.get(i).bits);
    }
  }
}

void test_flatten() {
  std::vector<Buffer<std::uint8_t>> tensors;
  std::vector<kernels::Span> spans;
  std::vector<std::uint8_t> expected;
  for (std::size_t count : kSizes) tensors.push_back(random_buffer<std::uint8_t>(count));
  for (Buffer<std::uint8_t>& tensor : tensors) {
    const std::size_t count = kSizes[spans.size() / 2];
    spans.push_back({tensor.data(), count});
    spans.push_back({nullptr, 0});
    for (std::size_t i = 0; i < count; ++i) expected.push_back(tensor.get(i));
  }
  Buffer<std::uint8_t> flat(expected.size());
  kernels::flatten(spans, flat.data());
  CHECK(equals(flat, expected) && flat.guards_hold());

  for (std::size_t i = 0; i < expected.size(); ++i) flat.set(i, expected[i] = static_cast<std::uint8_t>(~expected[i]));
  kernels::unflatten(flat.data(), spans);
  std::size_t at = 0;
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    const std::vector<std::uint8_t> part(expected.begin() + at, expected.begin() + at + kSizes[k]);
    CHECK(equals(tensors[k], part) && tensors[k].guards_hold(), "tensor", k);
    at += kSizes[k];
  }
}

void test_errors_and_levels(const std::string& chosen, const std::vector<std::string>& levels) {
  CHECK(chosen == levels.back(), "the default level is", chosen);
  for (const std::string& level : levels) {
    kernels::set_level(level);
    CHECK(kernels::level() == level);
  }
  CHECK_THROWS(UsageError, kernels::set_level("avx1024"));
  CHECK(kernels::level() == levels.back());

  std::array<std::byte, 8> bytes = {};
  const std::array<const std::byte*, 1> from = {bytes.data()};
  const std::array<std::byte*, 1> to = {bytes.data()};
  CHECK_THROWS(UsageError, kernels::reduce(ReduceOp::kAverage, DType::kFloat32, from, to, 1, 1, 1));
  CHECK_THROWS(UsageError, kernels::reduce(ReduceOp::kAdasum, DType::kFloat32, from, to, 1, 1, 1));
  CHECK_THROWS(UsageError, kernels::reduce(ReduceOp::kSum, DType::kFloat32, {}, to, 1, 1, 1));
  kernels::reduce(ReduceOp::kSum, DType::kFloat32, from, {}, 1, 1, 1);
  for (int type = 0; type < static_cast<int>(DType::kFloat16); ++type) {
    CHECK_THROWS(UsageError, kernels::axpby(DType(type), bytes.data(), bytes.data(), 1, 1, 1));
    CHECK_THROWS(UsageError, kernels::dots(DType(type), bytes.data(), bytes.data(), 1));
    CHECK_THROWS(UsageError, kernels::squared_distance(DType(type), bytes.data(), bytes.data(), 1));
  }
}

int run() {
  const std::string chosen(kernels::level());
  const std::vector<std::string> levels = available_levels();
  for (int code = 0; code < kDTypeCount; ++code) {
    const DType type = DType(code);
    dispatch(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      test_reduce<T>(levels, type);
      test_scale<T>(levels, type);
      if constexpr (is_float<T>) {
        test_axpby<T>(levels, type);
        test_dots<T>(levels, type);
      }
    });
  }
  test_every_value<Half>(levels, DType::kFloat16, 0x0200);
  test_every_value<BFloat16>(levels, DType::kBFloat16, 0x0040);
  test_flatten();
  test_errors_and_levels(chosen, levels);
  std::cout << "levels:";
  for (const std::string& level : levels) std::cout << ' ' << level;
  std::cout << '\n';
  return report();
}

}  // namespace
}  // namespace sordino::test

int main() { return sordino::test::run(); }
