// The kernels of one level. Each level's .cc file defines SORDINO_LEVEL and includes this.
//
// All templates have internal linkage and are in the level's own namespace. So the linker cannot use a copy that was
// compiled for a newer CPU in another level. A ctest looks for weak symbols in the objects.
#include "kernels/cpu/coding.h"
#include "kernels/cpu/dots.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/mixing.h"
#include "kernels/cpu/residues.h"
#include "kernels/cpu/scaling.h"
#include "kernels/cpu/stores.h"
#include "kernels/cpu/table.h"
#include "kernels/cpu/unchanged.h"

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

// Elements per pass. A block of them (at most 8 KiB) stays in the first-level cache.
constexpr std::size_t kBlock = 1024;
// Largest number of sources that one loop reads. Each number is one more loop to compile. So only sums of floats, which
// training needs most, have loops for more than two.
template <class T, class Op>
constexpr std::size_t kFan = std::is_same_v<Op, Sum> && !std::is_integral_v<T> ? 4 : 2;

inline std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

inline void copy_to_others(const Reduction& r, std::size_t offset, std::size_t bytes) {
  // The first destination's block is still in cache.
  for (std::size_t k = 1; k < r.destination_count; ++k) {
    if (r.streaming) {
      stream(r.destinations[k] + offset, r.destinations[0] + offset, bytes);
    } else {
      copy_to_read_lines(r.destinations[k] + offset, r.destinations[0] + offset, bytes);
    }
  }
}

// out = post * fold(carry, pre * sources...): one loop, which reads each source before it writes its element of out.
// The carry is the fold of earlier sources, already scaled by `pre`.
template <class T, class Op, bool kScaled, bool kCarry, int kSources, class Out>
void fold(Loose<Out>* out, const Loose<Stage<T>>* carry, const std::byte* const* sources, std::size_t offset,
          std::size_t count, Stage<T> pre, Stage<T> post) {
  const Loose<T>* s0 = loose<T>(sources[0] + offset);
  const Loose<T>* s1 = loose<T>(sources[kSources > 1 ? 1 : 0] + offset);
  const Loose<T>* s2 = loose<T>(sources[kSources > 2 ? 2 : 0] + offset);
  const Loose<T>* s3 = loose<T>(sources[kSources > 3 ? 3 : 0] + offset);
  for_lanes<T>(count, [=](auto lane, std::size_t i) {
    const auto read = [=](const Loose<T>* source) {
      const auto value = lane.load(source + i);
      if constexpr (kScaled) return value * pre;
      if constexpr (!kScaled) return value;
    };
    auto value = read(s0);
    if constexpr (kCarry) value = Op::apply(lane.load(carry + i), value);
    if constexpr (kSources > 1) value = Op::apply(value, read(s1));
    if constexpr (kSources > 2) value = Op::apply(value, read(s2));
    if constexpr (kSources > 3) value = Op::apply(value, read(s3));
    if constexpr (kScaled) value = value * post;
    lane.store(out + i, value);
  });
}

// fold for 1 to kFan sources.
template <class T, class Op, bool kScaled, bool kCarry>
void fold_some(Loose<T>* out, const Loose<Stage<T>>* carry, const std::byte* const* sources, std::size_t source_count,
               std::size_t offset, std::size_t count, Stage<T> pre, Stage<T> post) {
  // One source, neither scaled nor folded, is a copy and never comes here.
  if constexpr (kScaled || kCarry) {
    if (source_count == 1) return fold<T, Op, kScaled, kCarry, 1>(out, carry, sources, offset, count, pre, post);
  }
  if constexpr (kFan<T, Op> > 2) {
    if (source_count == 4) return fold<T, Op, kScaled, kCarry, 4>(out, carry, sources, offset, count, pre, post);
    if (source_count == 3) return fold<T, Op, kScaled, kCarry, 3>(out, carry, sources, offset, count, pre, post);
  }
  fold<T, Op, kScaled, kCarry, 2>(out, carry, sources, offset, count, pre, post);
}

// Floats, and integers that are not scaled. If only one of pre and post is 1, floats are still multiplied by it, which
// changes nothing: x * 1 is exact.
template <class T, class Op, bool kScaled>
void reduce_direct(const Reduction& r) {
  constexpr int kMost = static_cast<int>(kFan<T, Op>);
  const auto pre = static_cast<Stage<T>>(r.pre);
  const auto post = static_cast<Stage<T>>(r.post);
  const bool one_loop = r.source_count <= kMost && r.destination_count == 1;
  const std::size_t step = one_loop ? r.count : kBlock;
  Loose<Stage<T>> partial[kBlock];
  for (std::size_t begin = 0; begin < r.count; begin += step) {
    const std::size_t count = smaller(r.count - begin, step);
    const std::size_t offset = begin * sizeof(T);
    Loose<T>* out = loose<T>(r.destinations[0] + offset);
    if (r.source_count <= kMost) {
      fold_some<T, Op, kScaled, false>(out, nullptr, r.sources, r.source_count, offset, count, pre, post);
    } else {
      // The destination may be a source that is not read yet, so the result of earlier sources stays in `partial`.
      fold<T, Op, kScaled, false, kMost>(partial, nullptr, r.sources, offset, count, pre, 1);
      std::size_t done = kMost;
      for (; r.source_count - done > kMost; done += kMost) {
        fold<T, Op, kScaled, true, kMost>(partial, partial, r.sources + done, offset, count, pre, 1);
      }
      fold_some<T, Op, kScaled, true>(out, partial, r.sources + done, r.source_count - done, offset, count, pre, post);
    }
    copy_to_others(r, offset, count * sizeof(T));
  }
}

template <class T, class Op>
void reduce_scaled_integers(const Reduction& r) {
  constexpr std::size_t kStep = 4096 / sizeof(T);  // small enough for both arrays to stay in the first-level cache
  const Scaling<T> pre(r.pre, r.count), post(r.post, r.count);
  Loose<T> total[kStep], next[kStep];
  for (std::size_t begin = 0; begin < r.count; begin += kStep) {
    const std::size_t count = smaller(r.count - begin, kStep);
    const std::size_t offset = begin * sizeof(T);
    Loose<T>* out = loose<T>(r.destinations[0] + offset);
    // A lone source goes straight to the destination.
    const Loose<T>* folded = pre.apply(loose<T>(r.sources[0] + offset), r.source_count == 1 ? out : total, count);
    for (std::size_t k = 1; k < r.source_count; ++k) {
      const Loose<T>* value = pre.apply(loose<T>(r.sources[k] + offset), next, count);
      SORDINO_INDEPENDENT
      for (std::size_t i = 0; i < count; ++i) total[i].value = Op::apply(folded[i].value, value[i].value);
      folded = total;
    }
    const Loose<T>* result = post.apply(folded, out, count);
    if (result != out) __builtin_memcpy(out, result, count * sizeof(T));
    copy_to_others(r, offset, count * sizeof(T));
  }
}

template <class T, class Op>
void reduce(const Reduction& r) {
  if (r.pre == 1 && r.post == 1) {
    // Wrapping sums and products have the same bits with and without a sign.
    constexpr bool wraps = std::is_same_v<Op, Sum> || std::is_same_v<Op, Product>;
    if constexpr (std::is_integral_v<T> && wraps) {
      reduce_direct<std::make_unsigned_t<T>, Op, false>(r);
    } else {
      reduce_direct<T, Op, false>(r);
    }
  } else if constexpr (std::is_integral_v<T>) {
    reduce_scaled_integers<T, Op>(r);
  } else {
    reduce_direct<T, Op, true>(r);
  }
}

template <class T>
void axpby(const std::byte* x, std::byte* y, std::size_t count, double a, double b) {
  const auto stage_a = static_cast<Stage<T>>(a);
  const auto stage_b = static_cast<Stage<T>>(b);
  const Loose<T>* from = loose<T>(x);
  Loose<T>* to = loose<T>(y);
  for_lanes<T>(count, [=](auto lane, std::size_t i) {
    lane.store(to + i, lane.load(from + i) * stage_a + lane.load(to + i) * stage_b);
  });
}

template <class T>
constexpr void enter_folds(Table& table, DType type) {
  ReduceFn* row = table.reduce[static_cast<int>(type)];
  row[static_cast<int>(ReduceOp::kSum)] = reduce<T, Sum>;
  row[static_cast<int>(ReduceOp::kMin)] = reduce<T, Min>;
  row[static_cast<int>(ReduceOp::kMax)] = reduce<T, Max>;
  row[static_cast<int>(ReduceOp::kProduct)] = reduce<T, Product>;
}

template <class T>
constexpr void enter_floating(Table& table, DType type) {
  enter_folds<T>(table, type);
  table.axpby[static_cast<int>(type)] = axpby<T>;
  table.mix[static_cast<int>(type)] = mix<T>;
  table.dots[static_cast<int>(type)] = dots<T>;
  table.squared_distance[static_cast<int>(type)] = squared_distance<T>;
}

constexpr Table make_table() {
  Table table = {};
  // bool: for bytes that are 0 or 1, OR is the maximum and AND the minimum.
  ReduceFn* row = table.reduce[static_cast<int>(DType::kBool)];
  row[static_cast<int>(ReduceOp::kSum)] = row[static_cast<int>(ReduceOp::kMax)] = reduce<std::uint8_t, Max>;
  row[static_cast<int>(ReduceOp::kProduct)] = row[static_cast<int>(ReduceOp::kMin)] = reduce<std::uint8_t, Min>;
  enter_folds<std::uint8_t>(table, DType::kUInt8);
  enter_folds<std::int8_t>(table, DType::kInt8);
  enter_folds<std::uint16_t>(table, DType::kUInt16);
  enter_folds<std::int16_t>(table, DType::kInt16);
  enter_folds<std::uint32_t>(table, DType::kUInt32);
  enter_folds<std::int32_t>(table, DType::kInt32);
  enter_folds<std::uint64_t>(table, DType::kUInt64);
  enter_folds<std::int64_t>(table, DType::kInt64);
  enter_floating<Half>(table, DType::kFloat16);
  enter_floating<BFloat16>(table, DType::kBFloat16);
  enter_floating<float>(table, DType::kFloat32);
  enter_floating<double>(table, DType::kFloat64);
  enter_comparisons(table);
  enter_codes(table);
  enter_residues(table);
  return table;
}

}  // namespace

// Constant-initialized: no code of a level runs before the check of the CPU.
constinit const Table table = make_table();

}  // namespace sordino::kernels::SORDINO_LEVEL
