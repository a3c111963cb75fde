// Interface of one instruction set level: function pointers by element type and operation.
//
// The levels are compiled from the same source with different flags, so this interface uses plain structs and raw
// pointers only. An inline std:: function instantiated in the AVX-512 file would be a weak symbol, and the linker might
// keep that copy for all levels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "kernels/codecs.h"
#include "kernels/kernels.h"
#include "kernels/modulo.h"

namespace sordino::kernels {

// Arguments of kernels::reduce, with at least one source, one destination and one element.
struct Reduction {
  const std::byte* const* sources;
  std::size_t source_count;
  std::byte* const* destinations;
  std::size_t destination_count;
  std::size_t count;
  double pre;
  double post;
  bool streaming;  // all destinations but the first are written by streaming stores
};

// A comparison of two arrays of `count` elements. Elements are the same if their bits are equal. Unless `scale` is 0,
// they are also the same if they round to the same integer after multiplication by `scale` (unchanged.h).
struct Comparison {
  const std::byte* now;
  const std::byte* before;
  std::size_t count;
  double scale;
  std::byte* kept;         // copy of `now`, which may be `before`; null if not wanted
  std::uint8_t* counters;  // counters of changes, one per element, or null
};

// One average, as in mix.h.
struct Share {
  const int* of;
  std::size_t of_count;
  const int* into;  // at least one
  std::size_t into_count;
  double scale;
};

// The arguments of kernels::mix. `scratch` has room for kMixTile elements, at most 8 bytes each, of every input and of
// one sum.
inline constexpr std::size_t kMixTile = 128;
struct Mixture {
  const std::byte* const* inputs;
  std::size_t input_count;
  std::byte* const* outputs;
  const Share* shares;
  std::size_t share_count;
  std::size_t count;
  std::byte* scratch;
};

// One block of at most `block` values, to be encoded (codecs.h).
struct Encoding {
  const float* values;
  std::size_t count;
  std::size_t block;
  std::size_t kept;
  std::byte* encoded;
};

// One block to be decoded: values[i] = weight * x[i], or with `add`, values[i] += weight * x[i].
struct Decoding {
  const std::byte* encoded;
  std::size_t count;
  std::size_t block;
  std::size_t kept;
  float* values;
  float weight;
  bool add;
  float* given;  // counters of decoded values, one per value, or null
};

// One block of at most `block` values, to be encoded for an estimated distance of the receiver's values (modulo.h).
struct ResidueEncoding {
  const float* values;
  std::size_t count;
  std::size_t block;
  float distance;
  std::byte* encoded;
};

// change[i] += weight * (Q(x[i]) - Q(values[i])), where x are the values of another worker.
struct ResidueDecoding {
  const float* values;
  std::size_t count;
  std::size_t block;
  const std::byte* own;  // `values`, encoded
  const std::byte* encoded;
  float weight;
  float* change;
  float* distance;  // gets the largest |Q(x[i]) - values[i]|
};

// Header of a block of modulo codes: the low 10 bits are bits of the step, and the others are the checksum.
static constexpr std::uint32_t kStepMask = 0x3ff;
static constexpr int kStepShift = 21;               // a step is a positive float, with 2 bits of mantissa
static constexpr std::uint32_t kNotFinite = 0x3ff;  // a NaN
static constexpr std::uint32_t kLeastStep = 0x00800000, kMostStep = 0x7e800000;  // 2^-126 and 2^126

static inline std::uint32_t header_of(const std::byte* encoded) {
  std::uint32_t header;
  __builtin_memcpy(&header, encoded, sizeof header);
  return header;
}

// Bits of the step, as a float.
static constexpr std::uint32_t step_bits(std::uint32_t header) { return (header & kStepMask) << kStepShift; }

// Largest distance, in steps, that is always decoded correctly: both values are rounded.
static constexpr float reach_of(int bits) { return static_cast<float>((1 << (bits - 1)) - 2); }

static constexpr float margin_of(int bits) { return bits == 4 ? ModuloCodec::kMargin4 : ModuloCodec::kMargin8; }

static constexpr int residue_index(int bits) { return bits == 4 ? 0 : 1; }

using ReduceFn = void (*)(const Reduction&);
using AxpbyFn = void (*)(const std::byte* x, std::byte* y, std::size_t count, double a, double b);
using DotsFn = Dots (*)(const std::byte* x, const std::byte* y, std::size_t count);
using DistanceFn = double (*)(const std::byte* x, const std::byte* y, std::size_t count);
using MixFn = void (*)(const Mixture&);
using CountSameFn = std::size_t (*)(const Comparison&);
using EncodeFn = bool (*)(const Encoding&);                // returns whether all values are finite
using DecodeFn = bool (*)(const Decoding&);                // returns whether all positions are in the block
using ResidueEncodeFn = bool (*)(const ResidueEncoding&);  // returns whether all values are finite
using ResidueAddFn = bool (*)(const ResidueDecoding&);  // returns whether the checksum is right; if not, adds nothing
using LargestFn = std::uint32_t (*)(const float* values, std::size_t count);  // bits of the largest magnitude

inline constexpr int kReduceOpCount = 6;

// Null: the operation does not exist for the type (or is not a fold, such as kAverage).
struct Table {
  ReduceFn reduce[kDTypeCount][kReduceOpCount];
  AxpbyFn axpby[kDTypeCount];
  MixFn mix[kDTypeCount];
  DotsFn dots[kDTypeCount];
  DistanceFn squared_distance[kDTypeCount];
  CountSameFn count_same[kDTypeCount];
  EncodeFn encode[kCodeCount];
  DecodeFn decode[kCodeCount];
  ResidueEncodeFn encode_residues[2];
  ResidueAddFn add_residues[2];
  LargestFn largest;
};

namespace baseline {
extern const Table table;
}
namespace avx2 {
extern const Table table;
}
namespace avx512 {
extern const Table table;
}

// The table of the level in use.
const Table& current_table();

}  // namespace sordino::kernels
