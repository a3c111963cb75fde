// Which elements of some tensors a step left as they were: all of them compared in one pass over memory, or a sample
// of each tensor compared for a hundredth of that.
//
// An element is unchanged if its bits are: a NaN equals itself, and -0 differs from +0. Rounded to `digits` decimals it
// is also unchanged if both values, times 10^digits and rounded to the nearest integer (ties to even), are equal. That
// is computed in float32 (float64 for float64) and only below 2^23 (2^52) in magnitude: larger values, infinities among
// them, lie farther apart than the rounding, and only equal bits count.
//
// All functions accept any alignment and any count (0 included), never throw on valid arguments, and give the same
// results at every instruction set level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace sordino::kernels {

// A tensor in memory that holds several; what "before" it is has the same offset from another base.
struct Item {
  std::size_t offset;  // in bytes
  std::size_t elements;
  DType type;
};

// The tensors that the functions below go through, and where what belongs to each lies in arrays for all of them:
// item after item, without gaps. An item with elements has at least one sample, and no more than elements.
class Items {
 public:
  struct Row : Item {
    std::size_t samples;
    std::size_t first_element, first_sample, first_saved;  // the last one in bytes
  };

  // UsageError for a ratio of samples to elements outside (0, 1], or an item whose elements a uint32 cannot index.
  Items(const std::vector<Item>& items, double ratio);

  const std::vector<Row>& rows() const { return rows_; }
  std::size_t elements() const { return elements_; }
  std::size_t samples() const { return samples_; }
  std::size_t sample_bytes() const { return sample_bytes_; }

  // UsageError if some item cannot be rounded to that many digits (only floating types can, and to 15 at most).
  void check_digits(int digits) const;

 private:
  std::vector<Row> rows_;
  std::size_t elements_ = 0, samples_ = 0, sample_bytes_ = 0;
};

inline constexpr int kExact = -1;

// 10^digits; 0 for kExact.
double scale_of(int digits);

// counts[item] (int64) = how many elements are the same in `now` and `before`; then before = now. If `counters` (uint8,
// one an element) is not null, those of the elements that changed go up by one; where that makes one 255, all of the
// item are halved, so that counters keep telling what has moved most of late.
void unchanged(const Items& items, const std::byte* now, std::byte* before, std::byte* counts, int digits,
               std::byte* counters);

// Samples of every item: indices (uint32, rising) of one random element from each of as many equal stretches as there
// are samples, so that each element is as likely as any other. The same key draws the same samples.
void draw(const Items& items, std::uint64_t key, std::byte* indices);

// As samples, the elements of each item with the highest counters, of equal ones the first; indices are rising.
void select(const Items& items, const std::byte* counters, std::byte* indices);

// saved[k] = now[indices[k]] for all samples of all items.
void save_at(const Items& items, const std::byte* now, const std::byte* indices, std::byte* saved);

// counts[item] (int64) = how many samples are the same in `now` and `saved`.
void unchanged_at(const Items& items, const std::byte* now, const std::byte* saved, const std::byte* indices,
                  std::byte* counts, int digits);

}  // namespace sordino::kernels
