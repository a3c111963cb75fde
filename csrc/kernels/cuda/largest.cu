// The sparse codecs: the largest values of a block, by a block of threads.
//
//   1. the bar: the smallest kept magnitude, and how many values with it are kept. Three histograms find it: of the
//      magnitudes' upper 11, next 10 and last 10 bits, each for the values whose higher bits equal the bar's
//   2. the positions of the kept values, in rising order, in shared memory. Each warp has a part of the block
//   3. for kTop, the sums of kept magnitudes, by the first warp
//   4. the encoded bytes. A thread writes a whole byte, from all values that have bits in it
#include "kernels/cuda/coded.cuh"

namespace sordino::kernels::cuda {
namespace {

constexpr std::uint32_t kBins = 2048, kBinsOfThread = kBins / kThreads;

struct Bar {
  std::uint32_t magnitude, ties;
};

__device__ Bar find_bar(const float* values, std::uint32_t count, std::uint32_t kept) {
  __shared__ std::uint32_t bins[kBins];
  __shared__ Bar found;
  Bar bar{0, kept};  // ties: number of kept values with these upper bits
  for (int shift = 20, known = 31; shift >= 0; known = shift, shift -= 10) {
    for (std::uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) bins[bin] = 0;
    __syncthreads();
    const std::uint32_t mask = (1U << (known - shift)) - 1;
    each_value(values, count, threadIdx.x, kThreads, [&](std::uint32_t, float value) {
      const std::uint32_t bits = magnitude_bits(value);
      if (bits >> known == bar.magnitude >> known) atomicAdd(&bins[bits >> shift & mask], 1U);
    });
    __syncthreads();
    // Each thread takes some bins, from the highest one down.
    const std::uint32_t first = kBins - 1 - threadIdx.x * kBinsOfThread;
    std::uint32_t own = 0, all;
    for (std::uint32_t k = 0; k < kBinsOfThread; ++k) own += bins[first - k];
    std::uint32_t above = exclusive_sum<kThreads>(own, all);
    if (above < bar.ties && bar.ties <= above + own) {
      std::uint32_t bin = first;
      for (; above + bins[bin] < bar.ties; --bin) above += bins[bin];
      found = {bar.magnitude | bin << shift, bar.ties - above};
    }
    __syncthreads();
    bar = found;
  }
  return bar;
}

// Packs two numbers of at most 2^14, so that one sum adds both.
__device__ std::uint32_t packed(std::uint32_t above, std::uint32_t ties) { return above | ties << 16; }

// Writes the positions of the kept values. Returns whether all values that this thread kept are finite.
__device__ bool find_kept(const float* values, std::uint32_t count, std::uint32_t block, const Bar& bar,
                          std::uint16_t* positions) {
  __shared__ std::uint32_t of_warps[kWarps];
  const std::uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::uint32_t part = block / kWarps > kWarp ? block / kWarps : kWarp;
  const std::uint32_t begin = warp * part < count ? warp * part : count;
  const std::uint32_t end = count - begin < part ? count : begin + part;
  std::uint32_t own = 0;
  each_value(values + begin, end - begin, lane, kWarp, [&](std::uint32_t, float value) {
    const std::uint32_t bits = magnitude_bits(value);
    own += packed(bits > bar.magnitude, bits == bar.magnitude);
  });
  own = warp_sum(own);
  if (lane == 0) of_warps[warp] = own;
  __syncthreads();
  std::uint32_t before = 0;
  for (std::uint32_t other = 0; other < warp; ++other) before += of_warps[other];
  std::uint32_t above = before & 0xffff, ties = before >> 16;
  const std::uint32_t earlier = (1U << lane) - 1;
  bool finite = true;
  for (std::uint32_t first = begin; first < end; first += kWarp) {
    const std::uint32_t at = first + lane;
    const std::uint32_t bits = at < end ? magnitude_bits(values[at]) : 0;
    const bool more = at < end && bits > bar.magnitude, tie = at < end && bits == bar.magnitude;
    const std::uint32_t mores = __ballot_sync(kAllLanes, more), alike = __ballot_sync(kAllLanes, tie);
    const std::uint32_t ties_before = ties + __popc(alike & earlier);
    if (more || (tie && ties_before < bar.ties)) {
      const std::uint32_t kept_ties = ties_before < bar.ties ? ties_before : bar.ties;
      positions[above + __popc(mores & earlier) + kept_ties] = static_cast<std::uint16_t>(at);
      finite = finite && bits < kInfinity;
    }
    above += __popc(mores);
    ties += __popc(alike);
  }
  return finite;
}

// The levels of kTop, and the mean between them.
struct Levels {
  float lower, upper, mean;
};

// Called by one warp.
__device__ Levels find_levels(const float* values, std::uint32_t kept, const std::uint16_t* positions) {
  const std::uint32_t lane = threadIdx.x % kWarp;
  double sum = 0, lower = 0, upper = 0;
  std::uint32_t above = 0;
  for (std::uint32_t k = lane; k < kept; k += kWarp) {
    sum += static_cast<double>(float_of(magnitude_bits(values[positions[k]])));
  }
  const float mean = level_of(warp_sum(sum), kept);
  for (std::uint32_t k = lane; k < kept; k += kWarp) {
    const float value = float_of(magnitude_bits(values[positions[k]]));
    above += value > mean;
    (value > mean ? upper : lower) += static_cast<double>(value);
  }
  above = warp_sum(above);
  return {level_of(warp_sum(lower), kept - above), level_of(warp_sum(upper), above), mean};
}

// Bits of a kept value with its position, and bytes before the first value.
template <bool kExact>
SORDINO_BOTH constexpr std::uint32_t width_of(std::uint32_t position_bits) {
  return position_bits + (kExact ? 32 : 2);
}
template <bool kExact>
constexpr std::uint32_t kHeader = kExact ? 0 : 2 * sizeof(float);

template <bool kExact>
__global__ void __launch_bounds__(kThreads)
    encode_kept(const Blocks blocks, const float* values, std::byte* encoded, std::uint32_t* infinite) {
  extern __shared__ std::uint16_t positions[];  // of all kept values
  __shared__ Levels levels;
  __shared__ std::uint32_t unbounded;  // number of threads that keep a value that is not finite
  const std::uint64_t number = blockIdx.x;
  const std::uint32_t count = blocks.values_of(number), kept = blocks.kept < count ? blocks.kept : count;
  values += number << blocks.bits;
  encoded += number * blocks.bytes;
  if (threadIdx.x == 0) unbounded = 0;
  const Bar bar = find_bar(values, count, kept);
  if (!find_kept(values, count, blocks.block, bar, positions)) atomicAdd(&unbounded, 1U);
  __syncthreads();
  if constexpr (!kExact) {
    if (threadIdx.x < kWarp) {
      const Levels found = find_levels(values, kept, positions);
      if (threadIdx.x == 0) levels = found;
    }
    __syncthreads();
  }
  const bool finite = unbounded == 0;
  if (threadIdx.x == 0) {
    if constexpr (!kExact) {
      store_packed(encoded, finite ? levels.lower : float_of(kNan));
      store_packed(encoded + sizeof(float), finite ? levels.upper : float_of(kNan));
    }
    if (!finite && infinite != nullptr) atomicAdd(infinite, 1U);
  }
  std::byte* const out = encoded + kHeader<kExact>;
  const std::uint32_t width = width_of<kExact>(blocks.bits), bytes = (kept * width + 7) / 8;
  const auto bits_of_kept = [&](std::uint32_t k) {
    const float value = values[positions[k]];
    const std::uint32_t code = kExact ? bits_of(value) : kept_code(value, kExact ? 0 : levels.mean);
    return positions[k] | std::uint64_t{code} << blocks.bits;
  };
  for (std::uint32_t at = threadIdx.x; at < bytes; at += kThreads) {
    std::uint32_t k = at * 8 / width, filled = (k + 1) * width - at * 8;
    std::uint64_t byte = bits_of_kept(k) >> (width - filled);
    for (++k; filled < 8 && k < kept; ++k, filled += width) byte |= bits_of_kept(k) << filled;
    out[at] = static_cast<std::byte>(byte);
  }
}

template <bool kExact>
__global__ void __launch_bounds__(kThreads)
    decode_kept(const Blocks blocks, const std::byte* encoded, float* values, float weight, bool add, float* given) {
  const std::uint64_t number = blockIdx.x;
  const std::uint32_t count = blocks.values_of(number), kept = blocks.kept < count ? blocks.kept : count;
  values += number << blocks.bits;
  if (given != nullptr) given += number << blocks.bits;
  encoded += number * blocks.bytes;
  if (!add) {
    for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) values[i] = 0;
    __syncthreads();
  }
  const std::uint32_t width = width_of<kExact>(blocks.bits);
  for (std::uint32_t k = threadIdx.x; k < kept; k += kThreads) {
    const std::uint32_t begin = k * width, first = begin / 8, last = (begin + width - 1) / 8;
    std::uint64_t bits = 0;
    for (std::uint32_t at = first; at <= last; ++at) {
      bits |= static_cast<std::uint64_t>(encoded[kHeader<kExact> + at]) << ((at - first) * 8);
    }
    bits >>= begin % 8;
    const std::uint32_t place = static_cast<std::uint32_t>(bits) & (blocks.block - 1);
    const auto code = static_cast<std::uint32_t>(bits >> blocks.bits);
    if (place >= count) continue;
    float value = float_of(code);
    if constexpr (!kExact) {
      value = kept_value(code & 3, load_packed<float>(encoded), load_packed<float>(encoded + sizeof(float)));
    }
    values[place] += weight * value;
    if (given != nullptr) given[place] += 1;
  }
}

}  // namespace

void encode_largest(const Codec& codec, const float* values, std::size_t count, std::byte* encoded,
                    std::uint32_t* infinite, cudaStream_t stream) {
  const Blocks blocks(codec, count);
  launch("encode", codec.code() == Code::kTop ? encode_kept<false> : encode_kept<true>, grid_for(blocks.blocks(), 1),
         kThreads, codec.kept() * sizeof(std::uint16_t), stream, blocks, values, encoded, infinite);
}

void decode_largest(const Codec& codec, const std::byte* encoded, std::size_t count, float* values, float weight,
                    bool add, float* given, cudaStream_t stream) {
  const Blocks blocks(codec, count);
  launch("decode", codec.code() == Code::kTop ? decode_kept<false> : decode_kept<true>, grid_for(blocks.blocks(), 1),
         kThreads, 0, stream, blocks, encoded, values, weight, add, given);
}

}  // namespace sordino::kernels::cuda
