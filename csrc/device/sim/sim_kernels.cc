#include "device/sim/sim_kernels.h"

#include <cmath>
#include <cstring>

#include "base/error.h"
#include "device/sim/sim_device.h"

namespace sordino::sim {
namespace {

using kernels::Average;
using kernels::Codec;
using kernels::Items;
using kernels::Span;

void require_floating(DType type) {
  if (!is_floating(type)) throw UsageError(std::string(name_of(type)) + " is not a floating type");
}

class SimKernels : public Kernels {
 public:
  void reduce(ReduceOp op, DType type, const Rows& rows, std::size_t sources, double pre, double post,
              Stream stream) override {
    enqueue(stream, [=] {
      each(rows, [&](std::byte* const* at, std::size_t count) {
        const std::vector<const std::byte*> from(at, at + sources);
        kernels::reduce(op, type, from, {at + sources, rows.width - sources}, count, pre, post);
      });
    });
  }
  void axpby(DType type, const Rows& rows, double a, double b, Stream stream) override {
    require_floating(type);
    enqueue(stream, [=] {
      each(rows, [&](std::byte* const* at, std::size_t count) { kernels::axpby(type, at[0], at[1], count, a, b); });
    });
  }
  void flatten(std::span<const Span> tensors, std::byte* flat, Stream stream) override {
    enqueue(stream, [all = std::vector(tensors.begin(), tensors.end()), flat] { kernels::flatten(all, flat); });
  }
  void unflatten(const std::byte* flat, std::span<const Span> tensors, Stream stream) override {
    enqueue(stream, [all = std::vector(tensors.begin(), tensors.end()), flat] { kernels::unflatten(flat, all); });
  }
  void mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
           std::span<const Average> averages, std::size_t count, Stream stream) override {
    enqueue(stream,
            [=, in = std::vector(inputs.begin(), inputs.end()), out = std::vector(outputs.begin(), outputs.end()),
             all = std::vector(averages.begin(), averages.end())] { kernels::mix(type, in, out, all, count); });
  }

  void dots(DType type, const Rows& rows, double* results, Stream stream) override {
    require_floating(type);
    enqueue(stream, [=] {
      double* next = results;
      each(rows, [&](std::byte* const* at, std::size_t count) {
        const kernels::Dots found = kernels::dots(type, at[0], at[1], count);
        for (const double value : {found.xx, found.xy, found.yy}) *next++ = value;
      });
    });
  }
  void squared_distances(DType type, const Rows& rows, double* results, Stream stream) override {
    require_floating(type);
    enqueue(stream, [=] {
      double* next = results;
      each(rows, [&](std::byte* const* at, std::size_t count) {
        *next++ = kernels::squared_distance(type, at[0], at[1], count);
      });
    });
  }
  void norms(DType type, const Rows& rows, double* results, Stream stream) override {
    require_floating(type);
    enqueue(stream, [=] {
      double* next = results;
      each(rows, [&](std::byte* const* at, std::size_t count) {
        *next++ = std::sqrt(kernels::dots(type, at[0], at[0], count).xx);
      });
    });
  }

  void encode(const Codec& codec, const float* values, std::size_t count, std::byte* encoded, std::uint32_t* infinite,
              Stream stream) override {
    enqueue(stream, [=] {
      const std::size_t found = codec.encode(values, count, encoded);
      if (infinite != nullptr) *infinite += static_cast<std::uint32_t>(found);
    });
  }
  void decode(const Codec& codec, const std::byte* encoded, std::size_t count, float* values, float weight, bool add,
              float* given, Stream stream) override {
    enqueue(stream, [=] { codec.decode(encoded, count, values, weight, add, given, Codec::Outside::kLeaveOut); });
  }

  void unchanged(const Items& items, const std::byte* now, std::byte* before, std::byte* counts, int digits,
                 std::byte* counters, Stream stream) override {
    items.check_digits(digits);
    enqueue(stream, [=] { kernels::unchanged(items, now, before, counts, digits, counters); });
  }
  void draw(const Items& items, std::uint64_t key, std::byte* indices, Stream stream) override {
    enqueue(stream, [=] { kernels::draw(items, key, indices); });
  }
  void select(const Items& items, const std::byte* counters, std::byte* indices, Stream stream) override {
    enqueue(stream, [=] { kernels::select(items, counters, indices); });
  }
  void save_at(const Items& items, const std::byte* now, const std::byte* indices, std::byte* saved,
               Stream stream) override {
    enqueue(stream, [=] { kernels::save_at(items, now, indices, saved); });
  }
  void unchanged_at(const Items& items, const std::byte* now, const std::byte* saved, const std::byte* indices,
                    std::byte* counts, int digits, Stream stream) override {
    items.check_digits(digits);
    enqueue(stream, [=] { kernels::unchanged_at(items, now, saved, indices, counts, digits); });
  }

  void lars_step(DType type, const Rows& rows, const double* rates, const LarsStep& how, Stream stream) override {
    require_floating(type);
    enqueue(stream, [=] {
      const double* rate = rates;
      each(rows, [&](std::byte* const* at, std::size_t count) {
        std::vector<std::byte> change(count * size_of(type));
        if (count > 0) std::memcpy(change.data(), at[1], change.size());
        kernels::axpby(type, at[0], change.data(), count, how.decay, 1);
        kernels::scale(type, change.data(), count, *rate++);
        const std::byte* moved = change.data();
        if (rows.width > 2) {
          kernels::axpby(type, change.data(), at[2], count, 1, how.momentum);
          if (how.nesterov) {
            kernels::axpby(type, at[2], change.data(), count, how.momentum, 1);
          } else {
            moved = at[2];
          }
        }
        kernels::axpby(type, moved, at[0], count, -1, 1);
      });
    });
  }
  void lars_rates(const double* weight_norms, const double* gradient_norms, std::span<const std::uint8_t> scaled,
                  double* rates, const LarsRates& how, Stream stream) override {
    enqueue(stream, [=, scaled = std::vector(scaled.begin(), scaled.end())] {
      for (std::size_t t = 0; t < scaled.size(); ++t) {
        const double weight = weight_norms[t], gradient = gradient_norms[t];
        const bool local = scaled[t] && weight > 0 && gradient > 0;
        rates[t] = how.lr * (local ? how.trust * weight / (gradient + how.decay * weight + how.eps) : 1);
      }
    });
  }

 private:
  template <class Visit>
  static void each(const Rows& rows, Visit&& visit) {
    for (std::size_t t = 0; t < rows.size(); ++t) visit(rows.addresses.data() + t * rows.width, rows.counts[t]);
  }
};

}  // namespace

std::unique_ptr<Kernels> make_kernels() { return std::make_unique<SimKernels>(); }

}  // namespace sordino::sim
