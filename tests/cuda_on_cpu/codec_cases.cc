// Cases of the codecs: encoding, decoding, and adding what was decoded.
#include <array>
#include <cmath>
#include <limits>

#include "cases.h"
#include "kernels/codecs.h"

namespace sordino::on_cpu_test {
namespace {

using kernels::Code;
using kernels::Codec;

enum class Content { kOrdinary, kFewMagnitudes, kEdges, kTiny, kHuge, kSomeInfinite };
constexpr int kContents = 6;

float random_value(Content content) {
  const float sign = dice().below(2) != 0 ? -1.0F : 1.0F;
  // About normal, as gradients are.
  float value = 0;
  for (int k = 0; k < 4; ++k) value += static_cast<float>(dice().below(2001)) / 1000 - 1;
  switch (content) {
    case Content::kOrdinary: return value;
    case Content::kFewMagnitudes: return sign * static_cast<float>(dice().below(4));
    case Content::kEdges: {
      constexpr std::array edges{0.0F, 1e-45F, 1e-40F, 1.17549435e-38F, 7.8886e-31F, 1e-6F, 1.0F, 65504.0F};
      return sign * edges[dice().below(edges.size())];
    }
    case Content::kTiny: return value * 1e-40F;
    case Content::kHuge: return sign * std::numeric_limits<float>::max() * (1 - std::abs(value) / 64);
    case Content::kSomeInfinite: break;
  }
  constexpr std::array bad{NAN, INFINITY, -INFINITY};
  return dice().below(400) == 0 ? bad[dice().below(bad.size())] : value;
}

std::string name_of_case(const Codec& codec, std::size_t count) {
  return "codec " + std::to_string(static_cast<int>(codec.code())) + " with blocks of " +
         std::to_string(codec.block()) + ", keeps " + std::to_string(codec.kept()) + ", " + std::to_string(count) +
         " values";
}

void start_codec(Runner& runner, const Codec& codec, std::size_t count, Content content) {
  Case one(name_of_case(codec, count) + ", content " + std::to_string(static_cast<int>(content)));
  const auto floats = [&] { return one.add<float>(count, dice().below(16) * sizeof(float)); };
  const std::size_t values = floats(), plain = floats(), total = floats(), given = floats();
  for (std::size_t k = 0; k < count; ++k) {
    one.on_host<float>(values)[k] = random_value(content);
    one.on_host<float>(given)[k] = static_cast<float>(dice().below(5));
    one.on_host<float>(total)[k] = random_value(Content::kOrdinary);
  }
  const std::size_t encoded = one.add<std::uint8_t>(codec.bytes(count), dice().below(16));
  const std::size_t infinite = one.add<std::uint32_t>(1, 4);
  const bool counting = dice().below(4) != 0;
  const float weight = dice().below(2) != 0 ? -1.0F : 1.0F / 3;
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    const auto at = [base](std::size_t offset) { return reinterpret_cast<float*>(base + offset); };
    kernels.encode(codec, at(values), count, base + encoded,
                   counting ? reinterpret_cast<std::uint32_t*>(base + infinite) : nullptr, stream);
    kernels.decode(codec, base + encoded, count, at(plain), weight, false, nullptr, stream);
    kernels.decode(codec, base + encoded, count, at(total), weight, true, counting ? at(given) : nullptr, stream);
  };
  runner.start(std::move(one));
}

// Bytes that no encode() has written: each position is the last one of a whole block, and the block has fewer values.
void start_outside(Runner& runner, const Codec& codec, std::size_t count) {
  Case one(name_of_case(codec, count) + " beyond the end");
  const std::size_t encoded = one.add<std::uint8_t>(codec.bytes(count), 3), values = one.add<float>(count, 4, true);
  const std::size_t given = one.add<float>(count, 8, true);
  std::memset(one.on_host<std::byte>(encoded), 0xff, codec.bytes(count));
  one.work = [=](Kernels& kernels, std::byte* base, Stream stream) {
    kernels.decode(codec, base + encoded, count, reinterpret_cast<float*>(base + values), 1, true,
                   reinterpret_cast<float*>(base + given), stream);
  };
  runner.start(std::move(one));
}

}  // namespace

void start_codec_cases(Runner& runner, bool thorough) {
  int turn = static_cast<int>(dice().below(kContents));
  const auto content = [&] { return static_cast<Content>(turn++ % kContents); };
  for (const Code code : {Code::kInt8, Code::kInt4, Code::kTwoBit, Code::kSign}) {
    for (const std::size_t block : {32, 64, 128, 512, 16384}) {
      const Codec codec(code, block, 0);
      std::vector<std::size_t> counts{0, 1, block - 1, block, block + 1, 3 * block + 17};
      if (block < 1024) counts.push_back(17 * block + 5);  // several blocks of threads
      for (const std::size_t count : counts) {
        for (int k = 0; k < (thorough ? kContents : 1); ++k) start_codec(runner, codec, count, content());
        if (count == block + 1) start_codec(runner, codec, count, Content::kOrdinary);
      }
    }
  }
  for (const Code code : {Code::kTop, Code::kTopExact}) {
    for (const auto& [block, kept] : {std::pair<std::size_t, std::size_t>{32, 1},
                                      {32, 32},
                                      {128, 13},
                                      {512, 100},
                                      {4096, 64},
                                      {16384, 16384},
                                      {16384, 700}}) {
      const Codec codec(code, block, kept);
      std::vector<std::size_t> counts{1, block + 1, 2 * block + 17};
      if (block < 1024) counts.insert(counts.end(), {0, block - 1, block, 5 * block + 3});
      for (const std::size_t count : counts) {
        for (int k = 0; k < (thorough ? kContents : 1); ++k) start_codec(runner, codec, count, content());
        if (block < 1024) start_codec(runner, codec, count, Content::kFewMagnitudes);
      }
    }
    start_outside(runner, Codec(code, 32, 16), 5);
    start_outside(runner, Codec(code, 4096, 9), 4095);
  }
}

}  // namespace sordino::on_cpu_test
