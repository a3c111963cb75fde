// Functions of kernels.h: check the arguments, pick the table of the level in use, and call it.
#include <atomic>
#include <cstring>
#include <string>

#include "kernels/cpu/stores.h"
#include "kernels/cpu/table.h"
#include "kernels/kernels.h"
#include "kernels/publish.h"

#if defined(SORDINO_X86)
#include <cpuid.h>
#endif

namespace sordino::kernels {
namespace {

struct Level {
  std::string_view name;
  const Table* table;
  bool (*available)();
};

#if defined(SORDINO_X86)
// __builtin_cpu_supports also checks that the operating system saves the wide registers. Some compilers do not support
// F16C in it, so the bit itself is tested.
bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// Best first.
const Level levels[] = {
#if defined(SORDINO_X86)
    {"avx512", &avx512::table, has_avx512},
    {"avx2", &avx2::table, has_avx2},
#endif
    {"baseline", &baseline::table, [] { return true; }},
};

const Level* best_level() {
  const Level* level = levels;
  while (!level->available()) ++level;
  return level;
}

std::atomic<const Level*>& current() {
  static std::atomic<const Level*> level = best_level();
  return level;
}

[[noreturn]] void refuse(const char* function, DType type) {
  throw UsageError(std::string("kernels::") + function + ": " + std::string(name_of(type)) + " is not a floating type");
}

// A reduction of one unscaled source: copies its bytes, and reads each once.
void copy_to_all(const std::byte* source, std::span<std::byte* const> destinations, std::size_t bytes) {
  constexpr std::size_t kBlock = 16 * 1024;
  for (std::size_t begin = 0; begin < bytes; begin += kBlock) {
    const std::size_t count = bytes - begin < kBlock ? bytes - begin : kBlock;
    for (std::byte* destination : destinations) {
      if (destination != source) std::memcpy(destination + begin, source + begin, count);
    }
  }
}

}  // namespace

const Table& current_table() { return *current().load(std::memory_order_relaxed)->table; }

void reduce(ReduceOp op, DType type, std::span<const std::byte* const> sources,
            std::span<std::byte* const> destinations, std::size_t count, double pre, double post, Others others) {
  if (sources.empty()) throw UsageError("kernels::reduce needs at least one source");
  const int op_index = static_cast<int>(op);
  const ReduceFn fold = op_index < kReduceOpCount ? current_table().reduce[static_cast<int>(type)][op_index] : nullptr;
  if (fold == nullptr) throw UsageError("kernels::reduce cannot fold with operation " + std::to_string(op_index));
  if (destinations.empty() || count == 0) return;
  if (type == DType::kBool) pre = post = 1;
  if (sources.size() == 1 && pre == 1 && post == 1) {
    copy_to_all(sources[0], destinations, count * size_of(type));
  } else {
    const bool streaming = others == Others::kPublished && count * size_of(type) >= kLeastStreamed && streams();
    fold({sources.data(), sources.size(), destinations.data(), destinations.size(), count, pre, post, streaming});
    if (streaming) streamed();
  }
}

void scale(DType type, std::byte* data, std::size_t count, double factor) {
  const std::byte* const source = data;
  reduce(ReduceOp::kSum, type, {&source, 1}, {&data, 1}, count, 1, factor);
}

void axpby(DType type, const std::byte* x, std::byte* y, std::size_t count, double a, double b) {
  const AxpbyFn function = current_table().axpby[static_cast<int>(type)];
  if (function == nullptr) refuse("axpby", type);
  function(x, y, count, a, b);
}

Dots dots(DType type, const std::byte* x, const std::byte* y, std::size_t count) {
  const DotsFn function = current_table().dots[static_cast<int>(type)];
  if (function == nullptr) refuse("dots", type);
  return function(x, y, count);
}

double squared_distance(DType type, const std::byte* x, const std::byte* y, std::size_t count) {
  const DistanceFn function = current_table().squared_distance[static_cast<int>(type)];
  if (function == nullptr) refuse("squared_distance", type);
  return function(x, y, count);
}

std::string_view level() { return current().load(std::memory_order_relaxed)->name; }

void set_level(std::string_view name) {
  std::string available;
  for (const Level& level : levels) {
    if (!level.available()) continue;
    if (level.name == name) {
      current().store(&level, std::memory_order_relaxed);
      return;
    }
    available += (available.empty() ? "" : ", ") + std::string(level.name);
  }
  throw UsageError("CPU level \"" + std::string(name) + "\" is not available here; choose one of: " + available);
}

}  // namespace sordino::kernels
