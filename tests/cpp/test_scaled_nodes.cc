// Scaling in reductions among several hosts: each host scales once, also a host with a single rank, and early enough
// for types of 16 bits.
#include "check.h"
#include "engines.h"

using namespace sordino;
using namespace sordino::test;

namespace {

using Half = std::uint16_t;
constexpr Half kFour = 0x4400, kSixtyThousand = 0x7B53;

const std::vector<std::vector<int>> kLayouts{{0, 1}, {0, 1, 2}, {0, 0, 1}, {0, 1, 1}, {0, 0, 1, 1, 2}};

// Submits the same request on all ranks, each with memory of its own.
template <class Element>
std::vector<std::shared_ptr<Handle>> run(Engines& ranks, const Request& what, DType dtype,
                                         std::vector<std::vector<Element>>& values, bool in_place) {
  std::vector<std::shared_ptr<Handle>> handles;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    auto& mine = values[static_cast<std::size_t>(rank)];
    auto* data = reinterpret_cast<std::byte*>(mine.data());
    Request request = what;
    request.tensors = {{dtype, {static_cast<std::int64_t>(mine.size())}, data, in_place ? data : nullptr}};
    handles.push_back(ranks[rank].scheduler.submit(std::move(request)));
  }
  ranks.settle();
  for (const auto& handle : handles) CHECK(handle->done() && !handle->error);
  return handles;
}

void a_factor_counts_once() {
  for (const auto& nodes : kLayouts) {
    for (const std::size_t count : {1, 5000, 300000}) {
      Engines ranks(nodes);
      std::vector<std::vector<float>> values;
      float sum = 0;
      for (int rank = 0; rank < ranks.size(); ++rank) {
        values.emplace_back(count, static_cast<float>(rank + 1));
        sum += static_cast<float>(rank + 1);
      }
      Request request = barrier_called("x");
      request.opcode = Opcode::kAllreduce;
      request.op = ReduceOp::kSum;
      request.prescale = 0.5;
      run(ranks, request, DType::kFloat32, values, true);
      for (const auto& mine : values)
        CHECK(mine == std::vector<float>(count, sum / 2), mine[0], "for", sum / 2, "ranks", nodes.size());
    }
  }
}

// The sum would be out of range for 16 bits, so each part is divided before it is added.
void an_average_of_large_halves_is_finite() {
  for (const auto& nodes : kLayouts) {
    for (const Half value : {kFour, kSixtyThousand}) {
      if (nodes.size() == 5) continue;  // a fifth of it would be rounded
      const std::size_t count = 60 * nodes.size();
      Request request = barrier_called("x");
      request.op = ReduceOp::kAverage;
      request.opcode = Opcode::kAllreduce;
      Engines ranks(nodes);
      std::vector<std::vector<Half>> values(nodes.size(), std::vector<Half>(count, value));
      run(ranks, request, DType::kFloat16, values, true);
      for (const auto& mine : values) CHECK(mine == std::vector<Half>(count, value), mine[0], "ranks", nodes.size());
      request.opcode = Opcode::kReducescatter;
      Engines others(nodes);
      values.assign(nodes.size(), std::vector<Half>(count, value));
      for (const auto& handle : run(others, request, DType::kFloat16, values, false)) {
        const auto* mine = reinterpret_cast<const Half*>(handle->results.at(0).data.get());
        CHECK(std::vector<Half>(mine, mine + 60) == std::vector<Half>(60, value), mine[0], "ranks", nodes.size());
      }
    }
  }
}

}  // namespace

int main() {
  a_factor_counts_once();
  an_average_of_large_halves_is_finite();
  return report();
}
