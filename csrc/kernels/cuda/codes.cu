// The codecs that are not sparse. A warp encodes a block, and a thread decodes some values.
#include "kernels/cuda/coded.cuh"

namespace sordino::kernels::cuda {
namespace {

template <Code kCode>
__device__ BlockScale scale_of_block(const float* values, std::uint32_t count, std::uint32_t lane) {
  std::uint32_t largest = 0;
  each_value(values, count, lane, kWarp, [&](std::uint32_t, float value) {
    const std::uint32_t bits = magnitude_bits(value);
    largest = bits > largest ? bits : largest;
  });
  SORDINO_UNROLL
  for (std::uint32_t distance = kWarp / 2; distance > 0; distance /= 2) {
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, largest, static_cast<int>(distance));
    largest = other > largest ? other : largest;
  }
  return block_scale<kCode>(largest, count, [&](float factor) {
    float sum = 0;
    each_value(values, count, lane, kWarp, [&](std::uint32_t, float value) { sum += summand<kCode>(value, factor); });
    return warp_sum(sum);
  });
}

template <Code kCode>
__global__ void __launch_bounds__(kThreads)
    encode_blocks(const Blocks blocks, const float* values, std::byte* encoded, std::uint32_t* infinite) {
  constexpr std::uint32_t kCount = kPlanes<kCode>, kBits = 8 / kCount;
  constexpr std::uint32_t kBytes = kCount < 4 ? 4 / kCount : 1;  // that a thread writes per round of loads
  const std::uint64_t number = std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (number >= blocks.blocks()) return;
  const std::uint32_t lane = threadIdx.x % kWarp, count = blocks.values_of(number);
  values += number << blocks.bits;
  encoded += number * blocks.bytes;
  const BlockScale found = scale_of_block<kCode>(values, count, lane);
  if (lane == 0) {
    store_packed(encoded, found.scale);
    if (!found.finite && infinite != nullptr) atomicAdd(infinite, 1U);
  }
  std::byte* const out = encoded + sizeof(float);
  const std::uint32_t plane = blocks.block / kCount;
  for (std::uint32_t first = lane; first < plane; first += kBytes * kWarp) {
    float of_bytes[kBytes][kCount];
    SORDINO_UNROLL
    for (std::uint32_t u = 0; u < kBytes; ++u) {
      SORDINO_UNROLL
      for (std::uint32_t k = 0; k < kCount; ++k) {
        const std::uint32_t at = first + u * kWarp + k * plane;
        of_bytes[u][k] = at < count ? values[at] : 0;
      }
    }
    SORDINO_UNROLL
    for (std::uint32_t u = 0; u < kBytes; ++u) {
      const std::uint32_t at = first + u * kWarp;
      std::uint32_t byte = 0;
      SORDINO_UNROLL
      for (std::uint32_t k = 0; k < kCount; ++k) byte |= code_of<kCode>(of_bytes[u][k], found.factor) << (k * kBits);
      if (at < plane) out[at] = found.finite ? static_cast<std::byte>(byte) : std::byte{0};
    }
  }
}

constexpr int kDecoded = 4;  // values of a thread

template <Code kCode>
__global__ void __launch_bounds__(kThreads)
    decode_blocks(const Blocks blocks, const std::byte* encoded, float* values, float weight, bool add, float* given) {
  constexpr std::uint32_t kCount = kPlanes<kCode>, kBits = 8 / kCount, kMask = (1U << kBits) - 1;
  constexpr std::uint32_t kLog = index_bits(kCount);
  const std::uint32_t plane_bits = blocks.bits - kLog;  // a plane has 1 << plane_bits bytes
  const std::uint64_t first = std::uint64_t{blockIdx.x} * kDecoded * kThreads + threadIdx.x;
  float scales[kDecoded], before[kDecoded], counts[kDecoded];
  std::uint32_t codes[kDecoded];
  SORDINO_UNROLL
  for (int u = 0; u < kDecoded; ++u) {
    const std::uint64_t i = first + static_cast<std::uint32_t>(u * kThreads);
    if (i >= blocks.count) break;
    const std::byte* const from = encoded + (i >> blocks.bits) * blocks.bytes;
    const std::uint32_t place = static_cast<std::uint32_t>(i) & (blocks.block - 1);
    scales[u] = load_packed<float>(from);
    const std::uint32_t byte = place & ((1U << plane_bits) - 1), plane = place >> plane_bits;
    codes[u] = static_cast<std::uint32_t>(from[sizeof(float) + byte]) >> (plane * kBits) & kMask;
    before[u] = add ? values[i] : 0;
    counts[u] = given != nullptr ? given[i] : 0;
  }
  SORDINO_UNROLL
  for (int u = 0; u < kDecoded; ++u) {
    const std::uint64_t i = first + static_cast<std::uint32_t>(u * kThreads);
    if (i >= blocks.count) break;
    const float value = weight * value_of<kCode>(codes[u], scales[u]);
    values[i] = add ? before[u] + value : value;
    if (given != nullptr) given[i] = counts[u] + 1;
  }
}

// Calls visitor(std::integral_constant<Code, ...>{}) with a code that is not sparse.
template <class Visitor>
void dispatch_code(Code code, const Visitor& visitor) {
  switch (code) {
    case Code::kInt8: return visitor(std::integral_constant<Code, Code::kInt8>{});
    case Code::kInt4: return visitor(std::integral_constant<Code, Code::kInt4>{});
    case Code::kTwoBit: return visitor(std::integral_constant<Code, Code::kTwoBit>{});
    default: return visitor(std::integral_constant<Code, Code::kSign>{});
  }
}

}  // namespace

void CudaKernels::encode(const Codec& codec, const float* values, std::size_t count, std::byte* encoded,
                         std::uint32_t* infinite, Stream stream) {
  const Current current(ordinal_);
  const auto queue = cuda_stream(stream);
  if (codec.is_sparse()) return encode_largest(codec, values, count, encoded, infinite, queue);
  const Blocks blocks(codec, count);
  dispatch_code(codec.code(), [&](auto code) {
    launch("encode", encode_blocks<code()>, grid_for(blocks.blocks(), kWarps), kThreads, 0, queue, blocks, values,
           encoded, infinite);
  });
}

void CudaKernels::decode(const Codec& codec, const std::byte* encoded, std::size_t count, float* values, float weight,
                         bool add, float* given, Stream stream) {
  const Current current(ordinal_);
  const auto queue = cuda_stream(stream);
  if (codec.is_sparse()) return decode_largest(codec, encoded, count, values, weight, add, given, queue);
  const Blocks blocks(codec, count);
  dispatch_code(codec.code(), [&](auto code) {
    launch("decode", decode_blocks<code()>, grid_for(count, std::uint64_t{kDecoded} * kThreads), kThreads, 0, queue,
           blocks, encoded, values, weight, add, given);
  });
}

}  // namespace sordino::kernels::cuda
