// Operations of all kinds within a node, whose ranks give and get different numbers of rows: their tensors, requests
// and results.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "engines.h"

namespace sordino::test {

// A vector of a rank, in ordinary or in shared memory.
struct Vector {
  Vector(Engine& engine, std::size_t count, bool shared)
      : own(shared ? 0 : count),
        segment(shared ? engine.transport->node_memory().allocate(count * sizeof(float)) : nullptr),
        count(count) {}
  float* data() { return segment ? reinterpret_cast<float*>(segment->data) : own.data(); }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(data()); }

  std::vector<float> own;
  std::shared_ptr<Segment> segment;
  std::size_t count;
};

// Returns a request without a name. `in_place`: the result is written to the vector.
inline Request request_of(Opcode kind, Vector& vector, bool in_place) {
  Request request;
  request.opcode = kind;
  request.tensors.push_back({DType::kFloat32,
                             {static_cast<std::int64_t>(vector.count)},
                             vector.bytes(),
                             in_place ? vector.bytes() : nullptr});
  return request;
}

// The operations of `ranks` ranks. Reductions take the maximum, which is the last rank's value.
struct NodeMoves {
  int ranks;
  std::size_t count;  // rows of the first rank

  static float value(int rank, std::size_t operation, std::size_t place) {
    return static_cast<float>(place % 997 + 1000 * operation + 100'000 * static_cast<std::size_t>(rank));
  }
  // Ranks pass different numbers of rows to an all-gather and to an all-to-all.
  std::size_t rows(Opcode kind, int rank) const {
    const bool differ = kind == Opcode::kAllgather || kind == Opcode::kAlltoall;
    return count + (differ ? 10 * static_cast<std::size_t>(rank) : 0);
  }
  // First row that a rank gives to another one in an all-to-all. All ranks give more rows to later ones.
  std::size_t begin(int rank, int to) const {
    return rows(Opcode::kAlltoall, rank) * static_cast<std::size_t>(to * to) / static_cast<std::size_t>(ranks * ranks);
  }
  // First row that a rank gets in a reduce-scatter. The first ranks get one row more.
  std::size_t scattered(int rank) const {
    const auto of = static_cast<std::size_t>(ranks), place = static_cast<std::size_t>(rank);
    return count / of * place + std::min(place, count % of);
  }

  // Fills a rank's input, and returns its request.
  Request request(Opcode kind, int rank, std::size_t operation, Vector& vector) const {
    for (std::size_t place = 0; place < vector.count; ++place) vector.data()[place] = value(rank, operation, place);
    Request made = request_of(kind, vector, kind == Opcode::kAllreduce || kind == Opcode::kBroadcast);
    made.op = ReduceOp::kMax;
    made.root = root(operation);
    for (int to = 0; kind == Opcode::kAlltoall && to < ranks; ++to)
      made.splits.push_back(static_cast<std::int64_t>(begin(rank, to + 1) - begin(rank, to)));
    return made;
  }
  int root(std::size_t operation) const { return static_cast<int>(operation % static_cast<std::size_t>(ranks)); }

  // Returns how many values of a rank's result are wrong.
  std::size_t wrong(Opcode kind, int rank, std::size_t operation, Vector& vector, const Handle& handle) const {
    const auto* result =
        handle.results.empty() ? vector.data() : reinterpret_cast<const float*>(handle.results[0].data.get());
    std::size_t found = 0;
    const auto expect = [&](int from, std::size_t first, std::size_t end) {
      for (std::size_t place = first; place < end; ++place) found += *result++ != value(from, operation, place);
    };
    switch (kind) {
      case Opcode::kAllgather:
        for (int from = 0; from < ranks; ++from) expect(from, 0, rows(kind, from));
        break;
      case Opcode::kAlltoall:
        for (int from = 0; from < ranks; ++from) expect(from, begin(from, rank), begin(from, rank + 1));
        break;
      case Opcode::kReducescatter: expect(ranks - 1, scattered(rank), scattered(rank + 1)); break;
      case Opcode::kBroadcast: expect(root(operation), 0, count); break;
      default: expect(ranks - 1, 0, count);
    }
    return found;
  }
};

}  // namespace sordino::test
