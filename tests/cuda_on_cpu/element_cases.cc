// Cases of kernels that compute elements from elements at the same place, and of sums.
#include <algorithm>

#include "cases.h"

namespace sordino::on_cpu_test {
namespace {

using test::from_double;
using test::is_float;
using test::to_double;

// Rows of tensors at offsets, for any base.
struct Offsets {
  std::size_t width;
  std::vector<std::size_t> at, counts;

  Rows rows(std::byte* base) const {
    Rows rows{width, {}, counts};
    for (const std::size_t offset : at) rows.addresses.push_back(base + offset);
    return rows;
  }
};

// With `shared`, tensor number `shared` of each row is one of those before it.
template <class T>
Offsets add_rows(Case& one, std::size_t width, const std::vector<std::size_t>& counts, int phases, bool ordinary,
                 std::size_t shared = 0) {
  Offsets all{width, {}, counts};
  for (const std::size_t count : counts) {
    for (std::size_t k = 0; k < width; ++k) {
      if (shared != 0 && k == shared) {
        all.at.push_back(all.at[all.at.size() - 1 - dice().below(shared)]);
      } else {
        all.at.push_back(one.add<T>(count, phase_of(phases, k, sizeof(T)), ordinary));
      }
    }
  }
  return all;
}

std::string name_for(const char* kernel, DType type, const std::vector<std::size_t>& counts, int phases) {
  return std::string(kernel) + " of " + std::string(name_of(type)) + ", " + std::to_string(counts.size()) +
         " rows, the first of " + std::to_string(counts.empty() ? 0 : counts[0]) + ", phases " + std::to_string(phases);
}

template <class T>
void start_reduce(Runner& runner, DType type, const std::vector<std::size_t>& counts, int phases, ReduceOp op,
                  double pre, double post) {
  Case one(name_for("reduce", type, counts, phases));
  const std::size_t sources = 1 + dice().below(5), targets = 1 + dice().below(3);
  const auto all = add_rows<T>(one, sources + targets, counts, phases, false, dice().below(2) != 0 ? sources : 0);
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    kernels.reduce(op, type, all.rows(base), sources, pre, post, stream);
  };
  runner.start(std::move(one));
}

template <class T>
void start_axpby(Runner& runner, DType type, const std::vector<std::size_t>& counts, int phases) {
  Case one(name_for("axpby", type, counts, phases));
  const auto all = add_rows<T>(one, 2, counts, phases, false);
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    kernels.axpby(type, all.rows(base), 0.7, -1.3, stream);
  };
  runner.start(std::move(one));
}

// One step of LARS, as device_kernels.h defines it.
template <class T>
void lars_by_definition(const Rows& rows, const double* rates, const Kernels::LarsStep& how) {
  using Stage = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const auto decay = static_cast<Stage>(how.decay), momentum = static_cast<Stage>(how.momentum);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (std::size_t i = 0; i < rows.counts[row]; ++i) {
      T values[3] = {};
      Stage numbers[3] = {};
      const auto at = [&](std::size_t k) { return rows.addresses[row * rows.width + k] + i * sizeof(T); };
      for (std::size_t k = 0; k < rows.width; ++k) {
        std::memcpy(&values[k], at(k), sizeof(T));
        numbers[k] = static_cast<Stage>(to_double(values[k]));
      }
      const Stage d = static_cast<Stage>(rates[row]) * (numbers[1] + decay * numbers[0]);
      const Stage v = rows.width == 3 ? momentum * numbers[2] + d : d;
      from_double(static_cast<double>(v), values[2]);
      from_double(static_cast<double>(numbers[0] - (how.nesterov ? d + momentum * v : v)), values[0]);
      std::memcpy(at(0), &values[0], sizeof(T));
      if (rows.width == 3) std::memcpy(at(2), &values[2], sizeof(T));
    }
  }
}

template <class T>
void start_lars(Runner& runner, DType type, const std::vector<std::size_t>& counts, int phases, bool moving,
                bool nesterov) {
  Case one(name_for("lars_step", type, counts, phases));
  const auto all = add_rows<T>(one, moving ? 3 : 2, counts, phases, true);
  const std::size_t rates = one.add<double>(counts.size(), 0, true);
  const Kernels::LarsStep how{0.01, moving ? 0.9 : 0.0, nesterov};
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    kernels.lars_step(type, all.rows(base), reinterpret_cast<double*>(base + rates), how, stream);
  };
  one.reference = [=](Kernels&, std::byte* base, Stream) {
    lars_by_definition<T>(all.rows(base), reinterpret_cast<double*>(base + rates), how);
  };
  runner.start(std::move(one));
}

void start_lars_rates(Runner& runner, std::size_t tensors) {
  Case one("lars_rates of " + std::to_string(tensors));
  const std::size_t weights = one.add<double>(tensors, 0, true), gradients = one.add<double>(tensors, 8, true);
  const std::size_t rates = one.add<double>(tensors, 16, true);
  std::vector<std::uint8_t> scaled(tensors);
  for (auto& flag : scaled) flag = dice().below(3) != 0;
  for (std::size_t t = 0; t < tensors; t += 7) one.on_host<double>(weights)[t] = 0;
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    kernels.lars_rates(reinterpret_cast<double*>(base + weights), reinterpret_cast<double*>(base + gradients), scaled,
                       reinterpret_cast<double*>(base + rates), {0.1, 0.001, 1e-4, 1e-9}, stream);
  };
  runner.start(std::move(one));
}

template <class T>
void start_sums(Runner& runner, DType type, const std::vector<std::size_t>& counts, int phases) {
  Case one(name_for("sums", type, counts, phases));
  const std::size_t n = counts.size();
  const auto pairs = add_rows<T>(one, 2, counts, phases, true), singles = add_rows<T>(one, 1, counts, phases, true);
  const std::size_t dots = one.add_sums(3 * n), distances = one.add_sums(n), norms = one.add_sums(n);
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    kernels.dots(type, pairs.rows(base), reinterpret_cast<double*>(base + dots), stream);
    kernels.squared_distances(type, pairs.rows(base), reinterpret_cast<double*>(base + distances), stream);
    kernels.norms(type, singles.rows(base), reinterpret_cast<double*>(base + norms), stream);
  };
  runner.start(std::move(one));
}

template <class Visitor>
void each_type(const Visitor& visitor) {
  for (int code = 0; code < kDTypeCount; ++code) {
    dispatch(static_cast<DType>(code), [&](auto tag) { visitor(tag, static_cast<DType>(code)); });
  }
}

// Small tensors, so many that calls need each size of table, and several launches.
std::vector<std::size_t> many_counts(std::size_t rows, std::size_t most) {
  std::vector<std::size_t> counts(rows);
  for (auto& count : counts) count = dice().below(most);
  return counts;
}
constexpr std::size_t kRows[] = {112, 113, 256, 257, 1000, 1001, 2100};  // around the limits of rows of two tensors

}  // namespace

void start_element_cases(Runner& runner, bool thorough) {
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
  constexpr std::pair<double, double> kScales[] = {{1, 1}, {0.5, 1}, {1, 1.0 / 3}};
  each_type([&](auto tag, DType type) {
    using T = typename decltype(tag)::type;
    const auto limits = counts_around_limits(sizeof(T));
    int turn = static_cast<int>(dice().below(3));
    for (const ReduceOp op : kOps) {
      for (const auto& [pre, post] : kScales) {
        start_reduce<T>(runner, type, limits, turn++ % 3, op, pre, post);
        for (int phases = 0; thorough && phases < 3; ++phases) {
          start_reduce<T>(runner, type, limits, phases, op, pre, post);
          for (const std::size_t count : limits) start_reduce<T>(runner, type, {count}, phases, op, pre, post);
        }
      }
      ++turn;  // so that each scale comes with each kind of addresses
    }
    start_reduce<T>(runner, type, {}, 0, ReduceOp::kSum, 1, 1);
    start_reduce<T>(runner, type, {(std::size_t{2} << 20) / sizeof(T) + 4099}, 1, ReduceOp::kSum, 1, 0.5);
    start_reduce<T>(runner, type, many_counts(1001, 40), 2, ReduceOp::kMax, 1, 1);
    if constexpr (is_float<T>) {
      for (int phases = 0; phases < 3; ++phases) {
        start_axpby<T>(runner, type, limits, phases);
        for (const auto& [moving, nesterov] : {std::pair{false, false}, {true, false}, {true, true}}) {
          start_lars<T>(runner, type, limits, phases, moving, nesterov);
        }
      }
    }
  });
  for (const std::size_t rows : kRows) start_axpby<float>(runner, DType::kFloat32, many_counts(rows, 40), 2);
  start_lars<float>(runner, DType::kFloat32, many_counts(900, 40), 1, true, false);  // two launches
  for (const std::size_t tensors : {0u, 1u, 256u, 257u, 3072u, 3073u, 7000u}) start_lars_rates(runner, tensors);
}

void start_sum_cases(Runner& runner, bool thorough) {
  each_type([&](auto tag, DType type) {
    using T = typename decltype(tag)::type;
    if constexpr (is_float<T>) {
      const auto limits = counts_around_limits(sizeof(T));
      for (int phases = 0; phases < 3; ++phases) {
        start_sums<T>(runner, type, limits, phases);
        for (const std::size_t count : thorough ? limits : std::vector<std::size_t>{}) {
          start_sums<T>(runner, type, {count}, phases);
        }
      }
      start_sums<T>(runner, type, {(std::size_t{300} << 10) / sizeof(T) + 5, 3}, 2);
    }
  });
  // A row with more chunks than a block has threads.
  start_sums<BFloat16>(runner, DType::kBFloat16, {(std::size_t{9} << 20) / 2 + 5}, 1);
  for (const std::size_t rows : kRows) {
    if (thorough || rows == 113) start_sums<float>(runner, DType::kFloat32, many_counts(rows, 20), 1);
  }
}

}  // namespace sordino::on_cpu_test
