// Elements of some tensors that a step left unchanged: a comparison of all elements in one pass over memory, or of a
// sample of each tensor for a hundredth of the cost.
//
// An element is unchanged if its bits are: a NaN equals itself, and -0 differs from +0. Rounded to `digits` decimals,
// it is also unchanged if both values, times 10^digits and rounded to the nearest integer (ties to even), are equal.
// That is computed in float32 (float64 for float64), and only below 2^23 (2^52) in magnitude. Larger values, infinities
// included, lie farther apart than the rounding, so only equal bits count.
//
// All functions accept any alignment and any count (0 included), never throw on valid arguments, and give the same
// results at every instruction set level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace sordino::kernels {

// A tensor in memory that holds several. Its value from before has the same offset from another base.
struct Item {
  std::size_t offset;  // in bytes
  std::size_t elements;
  DType type;
};

// The tensors that the functions below visit. Arrays for all of them hold the entries of each tensor item after item,
// without gaps. An item with elements has at least one sample, and no more samples than elements.
class Items {
 public:
  struct Row : Item {
    std::size_t samples;
    std::size_t first_element, first_sample, first_saved;  // first_saved is in bytes
  };

  // Throws UsageError for a ratio of samples to elements outside (0, 1], or an item whose elements a uint32 cannot
  // index.
  Items(const std::vector<Item>& items, double ratio);

  const std::vector<Row>& rows() const { return rows_; }
  std::size_t elements() const { return elements_; }
  std::size_t samples() const { return samples_; }
  std::size_t sample_bytes() const { return sample_bytes_; }

  // Throws UsageError if some item cannot be rounded to that many digits (only floating types can, and to 15 at most).
  void check_digits(int digits) const;

 private:
  std::vector<Row> rows_;
  std::size_t elements_ = 0, samples_ = 0, sample_bytes_ = 0;
};

inline constexpr int kExact = -1;

// 10^digits; 0 for kExact.
double scale_of(int digits);

// counts[item] (int64) = number of elements that are the same in `now` and `before`; then before = now. If `counters`
// (uint8, one per element) is not null, counters of elements that changed go up by one. If one reaches 255, all
// counters of its item are halved, so that they keep showing which elements moved most in recent steps.
void unchanged(const Items& items, const std::byte* now, std::byte* before, std::byte* counts, int digits,
               std::byte* counters);

// Samples of each item: indices (uint32, rising) of one random element from each of equal stretches, one per sample, so
// that each element is equally likely. The same key draws the same samples.
void draw(const Items& items, std::uint64_t key, std::byte* indices);

// Samples that are the elements of each item with the highest counters; of equal ones the first. Indices are rising.
void select(const Items& items, const std::byte* counters, std::byte* indices);

// saved[k] = now[indices[k]] for all samples of all items.
void save_at(const Items& items, const std::byte* now, const std::byte* indices, std::byte* saved);

// counts[item] (int64) = number of samples that are the same in `now` and `saved`.
void unchanged_at(const Items& items, const std::byte* now, const std::byte* saved, const std::byte* indices,
                  std::byte* counts, int digits);

}  // namespace sordino::kernels
