// Copies for peers: every alignment by both kinds of stores, reductions with streamed destinations, and the choice
// between the two kinds.
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "kernels/publish.h"

using namespace sordino;
using namespace sordino::test;

namespace {

std::vector<std::byte> pattern(std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  for (std::size_t at = 0; at < bytes; ++at) made[at] = static_cast<std::byte>(at * 31 + at / 256 + 1);
  return made;
}

// Copies some bytes between all alignments, and looks at the bytes before and behind.
void copies_exactly(std::size_t bytes) {
  constexpr std::size_t kMargin = 128;
  const std::vector<std::byte> source = pattern(bytes + kMargin);
  for (const std::size_t from : {0, 1, 16, 63}) {
    for (std::size_t to = 0; to < 65; to += to < 4 ? 1 : 15) {
      std::vector<std::byte> target(bytes + 2 * kMargin, std::byte{0xee});
      kernels::publish(target.data() + to, source.data() + from, bytes);
      std::size_t wrong = 0;
      for (std::size_t at = 0; at < target.size(); ++at) {
        const bool inside = at >= to && at < to + bytes;
        wrong += target[at] != (inside ? source[from + at - to] : std::byte{0xee});
      }
      CHECK(wrong == 0, "bytes", bytes, "from", from, "to", to, "wrong", wrong);
    }
  }
}

void reductions_have_the_same_bits(DType type, double post) {
  const std::size_t count = 5003, bytes = count * size_of(type);
  const std::vector<std::byte> first = pattern(bytes), second = pattern(bytes + 7);
  const std::byte* const sources[] = {first.data(), second.data() + 7};
  std::vector<std::vector<std::byte>> results;
  for (const bool streaming : {false, true}) {
    kernels::set_streams(streaming);
    for (int destinations = 1; destinations <= 3; ++destinations) {
      std::vector<std::vector<std::byte>> outputs(destinations, std::vector<std::byte>(bytes + 1));
      std::vector<std::byte*> into;
      for (auto& output : outputs) into.push_back(output.data() + 1);
      kernels::reduce(ReduceOp::kMax, type, sources, into, count, 1, post, kernels::Others::kPublished);
      for (auto& output : outputs) results.push_back(std::move(output));
    }
  }
  for (const auto& result : results) CHECK(result == results.front(), name_of(type), "post", post);
}

// Plays `copies` copies, of which an ordinary one takes `ordinary` ns per byte and a streaming one `streaming`. Returns
// how many were streaming.
int play(kernels::StoreChoice& choice, int copies, double ordinary, double streaming, int* timed = nullptr) {
  constexpr std::size_t kBytes = 64 * 1024;
  int streamed = 0;
  for (int copy = 0; copy < copies; ++copy) {
    const auto plan = choice.plan();
    streamed += plan.streaming;
    if (plan.timed) choice.took(plan.streaming, kBytes, kBytes * (plan.streaming ? streaming : ordinary));
    if (plan.timed && timed) ++*timed;
  }
  return streamed;
}

constexpr double kNear[] = {0.1, 0.06}, kFar[] = {0.41, 0.035};  // ns per byte, as measured on two cores

void follows_the_place_of_the_processes() {
  kernels::StoreChoice choice;
  int timed = 0;
  CHECK(play(choice, 1000, kNear[0], kNear[1], &timed) <= 12 && !choice.streaming());
  CHECK(timed < 200, "timed", timed);
  CHECK(play(choice, 1000, kFar[0], kFar[1]) >= 900 && choice.streaming());     // after 32 copies at most
  CHECK(play(choice, 1000, kNear[0], kNear[1]) <= 300 && !choice.streaming());  // after 256
}

void a_slow_copy_changes_nothing() {
  kernels::StoreChoice choice;
  play(choice, 100, kNear[0], kNear[1]);
  for (int other = 0; other < 3; ++other) choice.took(false, 65536, 65536 * 50.0);  // the rank lost its core
  CHECK(!choice.streaming());
  play(choice, 100, kFar[0], kFar[1]);
  for (int other = 0; other < 3; ++other) choice.took(true, 65536, 65536 * 50.0);
  CHECK(choice.streaming());
}

}  // namespace

int main() {
  for (const bool streaming : {false, true}) {
    kernels::set_streams(streaming);
    CHECK(kernels::streams() == streaming);
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 4095, 4096, 4097, 16384, 20001}) copies_exactly(bytes);
  }
  kernels::set_streams({});
  for (int again = 0; again < 20; ++again) copies_exactly(20001);
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kInt32, DType::kUInt8}) {
    reductions_have_the_same_bits(type, 1);
    reductions_have_the_same_bits(type, 0.5);
  }
  follows_the_place_of_the_processes();
  a_slow_copy_changes_nothing();
  return report();
}
