// Functions of kernels/unchanged.h: the loop over the items, the samples, and the values at the samples. Comparisons
// are in the code of the levels. The code here uses only samples, or one byte per element.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/rng.h"
#include "kernels/cpu/table.h"
#include "kernels/unchanged.h"

namespace sordino::kernels {
namespace {

constexpr int kMostDigits = 15;

template <class T>
T load(const std::byte* array, std::size_t index) {
  T value;
  std::memcpy(&value, array + index * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void store(std::byte* array, std::size_t index, T value) {
  std::memcpy(array + index * sizeof(T), &value, sizeof(T));
}

[[noreturn]] void refuse(std::size_t item, const std::string& why) {
  throw UsageError("item " + std::to_string(item) + " " + why);
}

// to[k] = from[indices[k]]. Prefetches, because samples are too far apart for the hardware to predict them.
template <class Word>
void gather_words(const std::byte* from, const std::byte* indices, std::size_t count, std::size_t known,
                  std::byte* to) {
  constexpr std::size_t kAhead = 32;
  for (std::size_t k = 0; k < count; ++k) {
    if (k + kAhead < known) {
      __builtin_prefetch(from + load<std::uint32_t>(indices, k + kAhead) * sizeof(Word));
    }
    store(to, k, load<Word>(from, load<std::uint32_t>(indices, k)));
  }
}

// `known`: number of valid indices in the array, of which the first `count` are gathered.
void gather(DType type, const std::byte* from, const std::byte* indices, std::size_t count, std::size_t known,
            std::byte* to) {
  switch (size_of(type)) {
    case 1: return gather_words<std::uint8_t>(from, indices, count, known, to);
    case 2: return gather_words<std::uint16_t>(from, indices, count, known, to);
    case 4: return gather_words<std::uint32_t>(from, indices, count, known, to);
    default: return gather_words<std::uint64_t>(from, indices, count, known, to);
  }
}

// Halves all counters if one of them is 255.
void age(std::uint8_t* counters, std::size_t count) {
  if (count == 0 || std::memchr(counters, 255, count) == nullptr) return;
  for (std::size_t i = 0; i < count; ++i) counters[i] /= 2;
}

// Histogram in several parts: a second increment of the same bin would wait for the first one's store.
struct Histogram {
  static constexpr std::size_t kParts = 8, kBins = 256;
  std::uint32_t parts[kParts][kBins] = {};

  Histogram(const std::byte* values, std::size_t count) {
    std::size_t i = 0;
    for (; i + kParts <= count; i += kParts) {
      const auto eight = load<std::uint64_t>(values + i, 0);
      for (std::size_t part = 0; part < kParts; ++part) ++parts[part][eight >> (8 * part) & 0xff];
    }
    for (; i < count; ++i) ++parts[0][static_cast<std::uint8_t>(values[i])];
  }
  std::size_t operator[](std::size_t bin) const {
    std::size_t sum = 0;
    for (const auto& part : parts) sum += part[bin];
    return sum;
  }
};

// Compares eight bytes with a bound: the top bit of each byte of the result is set if the byte is at least the bound.
class AtLeast {
 public:
  explicit AtLeast(std::uint8_t bound) : low_((bound & 0x7f) * kOnes), small_(bound & 0x80 ? 0 : kTops) {}
  // Subtracts the bound's low bits from each byte's low bits under a set top bit, which is cleared if they are smaller.
  std::uint64_t operator()(std::uint64_t bytes) const {
    const std::uint64_t enough = (bytes | kTops) - low_;
    return (bytes & enough & kTops) | ((bytes | enough) & small_);
  }

 private:
  static constexpr std::uint64_t kOnes = 0x0101010101010101u, kTops = 0x80 * kOnes;
  std::uint64_t low_, small_;
};

void select_one(const std::byte* counters, std::size_t count, std::size_t samples, std::byte* indices) {
  if (samples == 0) return;
  const Histogram histogram(counters, count);
  std::size_t ties = samples;  // number of samples whose counter is exactly `cut`
  int cut = 255;
  for (; histogram[static_cast<std::size_t>(cut)] < ties; --cut) ties -= histogram[static_cast<std::size_t>(cut)];
  AtLeast candidate(static_cast<std::uint8_t>(cut));
  std::size_t taken = 0;
  std::uint64_t last = 0;  // zeros past the end do no harm: all samples are taken by then
  std::memcpy(&last, counters + count / 8 * 8, count % 8);
  for (std::size_t begin = 0; begin < count; begin += 8) {
    const auto eight = begin + 8 <= count ? load<std::uint64_t>(counters + begin, 0) : last;
    for (std::uint64_t found = candidate(eight); found != 0; found &= found - 1) {
      const int bit = __builtin_ctzll(found) - 7;
      if (static_cast<int>(eight >> bit & 0xff) == cut) {
        if (ties == 0) continue;
        if (--ties == 0 && cut < 255) candidate = AtLeast(static_cast<std::uint8_t>(cut + 1));
      }
      store(indices, taken, static_cast<std::uint32_t>(begin + static_cast<std::size_t>(bit) / 8));
      if (++taken == samples) return;
    }
  }
}

}  // namespace

Items::Items(const std::vector<Item>& items, double ratio) {
  if (!(ratio > 0 && ratio <= 1)) {
    throw UsageError("the ratio of samples to elements is " + std::to_string(ratio) + ", not in (0, 1]");
  }
  for (const Item& item : items) {
    if (item.elements > std::numeric_limits<std::uint32_t>::max()) {
      refuse(rows_.size(), "has " + std::to_string(item.elements) + " elements; the limit is 2^32 - 1");
    }
    const double wanted = std::ceil(ratio * static_cast<double>(item.elements));
    const std::size_t samples = std::min(item.elements, std::max<std::size_t>(1, static_cast<std::size_t>(wanted)));
    rows_.push_back({item, samples, elements_, samples_, sample_bytes_});
    elements_ += item.elements;
    samples_ += samples;
    sample_bytes_ += samples * size_of(item.type);
  }
}

void Items::check_digits(int digits) const {
  if (digits > kMostDigits) {
    throw UsageError("cannot round to " + std::to_string(digits) + " digits; the limit is " +
                     std::to_string(kMostDigits));
  }
  for (std::size_t item = 0; digits >= 0 && item < rows_.size(); ++item) {
    if (!is_floating(rows_[item].type)) {
      refuse(item, "is " + std::string(name_of(rows_[item].type)) + ", which has no digits to round to");
    }
  }
}

double scale_of(int digits) {
  double scale = digits < 0 ? 0 : 1;
  for (; digits > 0; --digits) scale *= 10;  // exact: 10^22 still fits in a double
  return scale;
}

void unchanged(const Items& items, const std::byte* now, std::byte* before, std::byte* counts, int digits,
               std::byte* counters) {
  items.check_digits(digits);
  const Table& table = current_table();
  std::size_t index = 0;
  for (const Items::Row& row : items.rows()) {
    const std::size_t same = table.count_same[static_cast<int>(row.type)](
        {now + row.offset, before + row.offset, row.elements, scale_of(digits), before + row.offset,
         counters ? reinterpret_cast<std::uint8_t*>(counters) + row.first_element : nullptr});
    if (counters != nullptr) age(reinterpret_cast<std::uint8_t*>(counters) + row.first_element, row.elements);
    store(counts, index++, static_cast<std::int64_t>(same));
  }
}

void draw(const Items& items, std::uint64_t key, std::byte* indices) {
  std::uint64_t item = 0;
  for (const Items::Row& row : items.rows()) {
    const std::uint64_t item_key = rng::key(key, item++);
    const double elements = static_cast<double>(row.elements), samples = static_cast<double>(row.samples);
    for (std::size_t sample = 0; sample < row.samples; ++sample) {
      const double at = static_cast<double>(sample) + rng::unit(rng::key(item_key, sample));
      const auto index = static_cast<std::uint64_t>(at * elements / samples);
      store(indices, row.first_sample + sample, static_cast<std::uint32_t>(std::min(index, row.elements - 1)));
    }
  }
}

void select(const Items& items, const std::byte* counters, std::byte* indices) {
  for (const Items::Row& row : items.rows()) {
    select_one(counters + row.first_element, row.elements, row.samples,
               indices + row.first_sample * sizeof(std::uint32_t));
  }
}

void save_at(const Items& items, const std::byte* now, const std::byte* indices, std::byte* saved) {
  for (const Items::Row& row : items.rows()) {
    gather(row.type, now + row.offset, indices + row.first_sample * sizeof(std::uint32_t), row.samples, row.samples,
           saved + row.first_saved);
  }
}

void unchanged_at(const Items& items, const std::byte* now, const std::byte* saved, const std::byte* indices,
                  std::byte* counts, int digits) {
  items.check_digits(digits);
  constexpr std::size_t kBlock = 512;
  std::byte values[kBlock * sizeof(std::uint64_t)];
  std::size_t index = 0;
  for (const Items::Row& row : items.rows()) {
    const CountSameFn count_same = current_table().count_same[static_cast<int>(row.type)];
    std::size_t same = 0;
    for (std::size_t begin = 0; begin < row.samples; begin += kBlock) {
      const std::size_t left = row.samples - begin, count = std::min(left, kBlock);
      const std::byte* before = saved + row.first_saved + begin * size_of(row.type);
      gather(row.type, now + row.offset, indices + (row.first_sample + begin) * sizeof(std::uint32_t), count, left,
             values);
      same += count_same({values, before, count, scale_of(digits), nullptr, nullptr});
    }
    store(counts, index++, static_cast<std::int64_t>(same));
  }
}

}  // namespace sordino::kernels
