// Counts of the elements that a step left unchanged, for some tensors. All elements are compared, in one pass over
// memory, or a sample of each tensor, for example at a hundredth of the cost.
//
// An element is unchanged if its bits are: a NaN equals itself, and -0 differs from +0. If `digits` is not negative, it
// is also unchanged if both values, times 10^digits and rounded to the nearest integer (ties to even), are equal. This
// is computed in float32 (in float64 for float64), and only for products below 2^23 (2^52) in magnitude. Larger values,
// infinities included, are farther apart than the rounding, so for them only bits count.
//
// All functions accept any alignment and any count (0 included), never throw on valid arguments, and give the same
// results at every instruction set level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace sordino::kernels {

// A tensor in memory that holds several tensors. Its previous value has the same offset in other memory.
struct Item {
  std::size_t offset;  // in bytes
  std::size_t elements;
  DType type;
};

// The tensors that the functions below visit. Arrays with entries for elements or samples hold them item after item,
// without gaps. An item with elements has at least one sample, and no more samples than elements.
class Items {
 public:
  struct Row : Item {
    std::size_t samples;
    std::size_t first_element, first_sample, first_saved;  // first_saved is in bytes
  };

  // `ratio`: samples per element. Throws UsageError unless it is in (0, 1], and for an item with 2^32 elements or more.
  Items(const std::vector<Item>& items, double ratio);

  const std::vector<Row>& rows() const { return rows_; }
  std::size_t elements() const { return elements_; }
  std::size_t samples() const { return samples_; }
  std::size_t sample_bytes() const { return sample_bytes_; }

  // Throws UsageError if an item cannot be rounded to `digits` digits: only floats can, and to at most 15.
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
// counters of its item are halved, so that they keep showing which elements changed most in recent steps.
void unchanged(const Items& items, const std::byte* now, std::byte* before, std::byte* counts, int digits,
               std::byte* counters);

// Draws the samples of each item: divides it into equal stretches, one per sample, and writes the index (uint32) of a
// random element of each. So indices rise, and all elements are equally likely. The same key draws the same samples.
void draw(const Items& items, std::uint64_t key, std::byte* indices);

// Takes as samples the elements of each item with the highest counters; among equal ones, the first. Indices rise.
void select(const Items& items, const std::byte* counters, std::byte* indices);

// saved[k] = now[indices[k]] for all samples of all items.
void save_at(const Items& items, const std::byte* now, const std::byte* indices, std::byte* saved);

// counts[item] (int64) = number of samples that are the same in `now` and `saved`.
void unchanged_at(const Items& items, const std::byte* now, const std::byte* saved, const std::byte* indices,
                  std::byte* counts, int digits);

}  // namespace sordino::kernels
