// Exchanges on worlds of threads: every element of every rank becomes, to the bit, the average of the topology, summed
// in the order of the participants. This holds however ranks are placed on nodes, and for late ranks.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "collectives/exchange.h"
#include "engine/world.h"
#include "kernels/kernels.h"
#include "transport/sim/sim.h"

using namespace sordino;

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using topology::At;
using topology::Row;

using Rows = std::vector<std::vector<Row>>;  // by group and rank

// A topology that is written out. Destinations are in falling order, as callers must not rely on an order.
class Table : public topology::Topology {
 public:
  Table(int size, Rows rows) : Topology(size), rows_(std::move(rows)) {}
  void row(At at, int rank, Row& row) const override { row = rows_.at(at.segment).at(static_cast<std::size_t>(rank)); }
  void destinations(At at, int rank, std::vector<int>& ranks) const override {
    ranks.clear();
    for (int other = size() - 1; other >= 0; --other) {
      const auto& sources = rows_.at(at.segment).at(static_cast<std::size_t>(other)).sources;
      if (std::find(sources.begin(), sources.end(), rank) != sources.end()) ranks.push_back(other);
    }
  }

 private:
  const Rows rows_;
};

// An exchange of all ranks.
struct What {
  std::shared_ptr<const Layout> layout;
  std::shared_ptr<const topology::Topology> topology;
  bool shared, without_own, in_place;
};

struct Rank {
  std::unique_ptr<World> world;
  std::shared_ptr<ReceiveBuffer> buffer;
  std::size_t buffer_bytes = 0;  // bytes needed so far
  std::vector<std::shared_ptr<Segment>> shared;
  std::vector<Bytes> own;
};

// Nodes whose ranks have memory for exchanges: `kArenas` arenas, of which each exchange uses other ones.
class Nodes {
 public:
  static constexpr std::size_t kArenas = 4;

  Nodes(std::vector<int> nodes, std::size_t bytes, double timeout_s = 20)
      : nodes(std::move(nodes)), network(this->nodes) {
    Config config = Config::from_environment();
    config.timeout_s = timeout_s;
    for (auto& transport : network.transports()) {
      Rank& rank = ranks.emplace_back();
      rank.world = std::make_unique<World>(std::move(transport), config);
      rank.buffer = std::make_shared<ReceiveBuffer>(rank.world->node_memory());
      for (std::size_t arena = 0; arena < kArenas; ++arena) {
        rank.shared.push_back(rank.world->node_memory().allocate(bytes));
        rank.own.emplace_back(bytes);
      }
    }
  }
  int size() const { return static_cast<int>(nodes.size()); }
  std::byte* arena(std::size_t rank, std::size_t which, bool shared) {
    return shared ? ranks[rank].shared[which]->data : ranks[rank].own[which].data();
  }
  std::shared_ptr<Handle> submit(std::size_t rank, const What& what, const std::byte* source, std::byte* result,
                                 std::shared_ptr<const Handle> after = nullptr) {
    Request request;
    request.name = "exchange " + std::to_string(number++);
    request.opcode = Opcode::kExchange;
    request.exchange = std::make_shared<Exchange>(Exchange{what.layout, what.topology, source, result, what.shared,
                                                           what.without_own, ranks[rank].buffer, Route::kHost});
    request.after = std::move(after);
    return ranks[rank].world->submit(std::move(request));
  }

  const std::vector<int> nodes;
  sim::Network network;
  std::vector<Rank> ranks;
  int number = 0;
};

void rethrow(const Handle& handle) {
  if (handle.error) std::rethrow_exception(handle.error);
}

// ---- expected results ----------------------------------------------------------------------------------------------

// Returns the result of rank `me`, from sums in the order of the participants.
Bytes expected(const What& what, const std::vector<Bytes>& before, const Bytes& result_before, std::size_t me) {
  Bytes after = result_before;
  for (const LayoutSegment& run : what.layout->segments()) {
    Row row;
    what.topology->row({0, static_cast<std::uint32_t>(run.group)}, static_cast<int>(me), row);
    std::set<int> of(row.sources.begin(), row.sources.end());
    if (row.keeps_own && !what.without_own) of.insert(static_cast<int>(me));
    std::vector<const std::byte*> sources;
    for (const int rank : of) sources.push_back(before[static_cast<std::size_t>(rank)].data() + run.offset);
    std::byte* destinations[] = {after.data() + run.offset};
    if (sources.empty()) {
      std::memset(destinations[0], 0, run.bytes);
    } else {
      kernels::reduce(ReduceOp::kSum, run.dtype, sources, destinations, run.bytes / size_of(run.dtype), 1, row.scale);
    }
  }
  return after;
}

std::map<std::size_t, std::size_t> bytes_of_groups(const Layout& layout) {
  std::map<std::size_t, std::size_t> bytes;
  for (const LayoutSegment& run : layout.segments()) bytes[run.group] += run.bytes;
  return bytes;
}

// Returns the bytes that a rank sends within its node and across nodes. With shared memory it sends once to each other
// node.
std::pair<std::uint64_t, std::uint64_t> expected_traffic(const What& what, const std::vector<int>& nodes,
                                                         std::size_t me) {
  std::uint64_t inside = 0, across = 0;
  for (const auto& [group, bytes] : bytes_of_groups(*what.layout)) {
    std::vector<int> destinations;
    what.topology->destinations({0, static_cast<std::uint32_t>(group)}, static_cast<int>(me), destinations);
    std::set<int> served;
    for (const int to : destinations) {
      const int node = nodes[static_cast<std::size_t>(to)];
      if (node == nodes[me]) {
        inside += bytes;
      } else if (!what.shared || served.insert(node).second) {
        across += bytes;
      }
    }
  }
  return {inside, across};
}

// Returns the bytes that a rank's receive buffer must hold: the first rank of a node that needs data of another node
// receives them.
std::size_t expected_buffer(const What& what, const std::vector<int>& nodes, std::size_t me) {
  std::size_t copies = 0, stride = 0;
  for (const auto& [group, bytes] : bytes_of_groups(*what.layout)) {
    std::set<int> served, received;
    for (std::size_t rank = 0; rank <= me; ++rank) {
      if (rank != me && (!what.shared || nodes[rank] != nodes[me])) continue;
      Row row;
      what.topology->row({0, static_cast<std::uint32_t>(group)}, static_cast<int>(rank), row);
      for (const int source : row.sources) {
        if (what.shared && nodes[static_cast<std::size_t>(source)] == nodes[me]) continue;
        if (served.insert(source).second && rank == me) received.insert(source);
      }
    }
    copies = std::max(copies, received.size());
    if (received.empty()) continue;
    for (const LayoutSegment& run : what.layout->segments()) {
      if (run.group == group) stride += (run.bytes + Layout::kAlignment - 1) / Layout::kAlignment * Layout::kAlignment;
    }
  }
  return copies * stride;
}

// ---- random data ---------------------------------------------------------------------------------------------------

using Random = std::mt19937;

int draw(Random& random, int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }

// Writes values whose sums depend on the order.
void fill(Random& random, const Layout& layout, std::byte* data) {
  constexpr float few[] = {1e8f, -1e8f, 1, -3, 0.125f, 1e4f, -1e4f, 0.7f};
  for (const LayoutSegment& run : layout.segments()) {
    for (std::size_t at = 0; at < run.bytes; at += size_of(run.dtype)) {
      const float value = few[random() % 8] + static_cast<float>(random() % 100) / 64;
      std::byte* place = data + run.offset + at;
      if (run.dtype == DType::kFloat64) {
        const double wide = value;
        std::memcpy(place, &wide, sizeof wide);
      } else if (run.dtype == DType::kFloat32) {
        std::memcpy(place, &value, sizeof value);
      } else if (run.dtype == DType::kBFloat16) {
        std::memcpy(place, reinterpret_cast<const std::byte*>(&value) + 2, 2);
      } else {
        const auto half = static_cast<std::uint16_t>(random() % 0x7800);  // positive and finite
        std::memcpy(place, &half, sizeof half);
      }
    }
  }
}

// Returns a layout of several groups, some with several dtypes, odd sizes and empty tensors.
std::shared_ptr<const Layout> random_layout(Random& random, int groups) {
  constexpr DType dtypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  constexpr std::int64_t counts[] = {1, 3, 17, 64, 129, 700, 1500};
  std::vector<TensorSpec> tensors;
  std::vector<std::size_t> group_of;
  for (int group = 0; group < groups; ++group) {
    for (int tensor = draw(random, 3); tensor >= 0; --tensor) {
      tensors.push_back({std::to_string(tensors.size()), dtypes[draw(random, 4)], {counts[draw(random, 7)]}});
      group_of.push_back(static_cast<std::size_t>(group));
    }
  }
  return std::make_shared<Layout>(tensors, group_of);
}

std::vector<int> some(Random& random, int size, int without) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (rank != without && draw(random, 2) == 0) ranks.push_back(rank);
  }
  std::shuffle(ranks.begin(), ranks.end(), random);
  return ranks;
}

Row random_row(Random& random, int size, int rank) {
  Row row;
  switch (draw(random, 6)) {
    case 0: break;                   // unchanged
    case 1: row.scale = 0.5; break;  // its own, scaled
    case 2:
      row.sources = some(random, size, rank);
      row.average();
      break;
    case 3:  // of others only, or of no rank
      row.sources = some(random, size, rank);
      row.keeps_own = false;
      row.scale = draw(random, 2) == 0 ? 1 : 0.25;
      break;
    case 4:
      row.sources = some(random, size, rank);
      row.scale = 0.75;
      break;
    default:  // a copy
      row.keeps_own = size < 2;
      if (size > 1) row.sources = {(rank + 1 + draw(random, size - 1)) % size};
  }
  return row;
}

// Returns random rows; sometimes all ranks use the same sources, not all with the same scale.
std::vector<Row> random_rows(Random& random, int size) {
  std::vector<Row> rows;
  const bool alike = draw(random, 3) == 0;
  const std::vector<int> of = some(random, size, -1);
  for (int rank = 0; rank < size; ++rank) {
    if (!alike) {
      rows.push_back(random_row(random, size, rank));
      continue;
    }
    Row& row = rows.emplace_back();
    row.sources = of;
    std::shuffle(row.sources.begin(), row.sources.end(), random);
    row.keeps_own = std::erase(row.sources, rank) > 0;
    row.scale = draw(random, 4) == 0 ? 2.0 : 1.0 / 3;
  }
  return rows;
}

What random_exchange(Random& random, int size) {
  const int groups = 1 + draw(random, 4);
  Rows rows;
  for (int group = 0; group < groups; ++group) rows.push_back(random_rows(random, size));
  return {random_layout(random, groups), std::make_shared<Table>(size, std::move(rows)), draw(random, 4) != 0,
          draw(random, 4) == 0, draw(random, 2) == 0};
}

// ---- the tests -----------------------------------------------------------------------------------------------------

constexpr std::size_t kRoom = std::size_t{1} << 18;

// Makes one exchange with other memory than the last one, in which one rank may be late. Checks the bits of all ranks,
// the memory around them, and the bytes sent.
void exchange_once(Nodes& nodes, const What& what, Random& random, int late) {
  const auto size = static_cast<std::size_t>(nodes.size());
  std::vector<std::size_t> sources(size), results(size);
  std::vector<Bytes> before(size), results_before(size);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> traffic(size);
  for (std::size_t me = 0; me < size; ++me) {
    sources[me] = random() % Nodes::kArenas;
    results[me] = what.in_place ? sources[me] : (sources[me] + 1 + random() % (Nodes::kArenas - 1)) % Nodes::kArenas;
    for (std::size_t which = 0; which < Nodes::kArenas; ++which) {
      std::byte* arena = nodes.arena(me, which, what.shared);
      std::memset(arena, 0x5a, kRoom);
      if (which != results[me] || what.in_place) fill(random, *what.layout, arena);  // wrong arenas have values, too
    }
    const std::byte* source = nodes.arena(me, sources[me], what.shared);
    const std::byte* result = nodes.arena(me, results[me], what.shared);
    before[me].assign(source, source + kRoom);
    results_before[me].assign(result, result + kRoom);
    const TrafficCounters& sent = nodes.ranks[me].world->traffic();
    traffic[me] = {sent.inside, sent.across};
  }
  const auto held = std::make_shared<Handle>();
  std::vector<std::shared_ptr<Handle>> handles;
  for (std::size_t me = 0; me < size; ++me) {
    handles.push_back(nodes.submit(me, what, nodes.arena(me, sources[me], what.shared),
                                   nodes.arena(me, results[me], what.shared),
                                   static_cast<int>(me) == late ? held : nullptr));
  }
  if (late >= 0) {
    std::this_thread::sleep_for(milliseconds(10));  // time for errors of the others
    held->finish();
    nodes.ranks[static_cast<std::size_t>(late)].world->wake();
  }
  for (std::size_t me = 0; me < size; ++me) {
    nodes.ranks[me].world->wait(*handles[me]);
    rethrow(*handles[me]);
  }
  for (std::size_t me = 0; me < size; ++me) {
    const Bytes want = expected(what, before, results_before[me], me);
    CHECK(std::memcmp(nodes.arena(me, results[me], what.shared), want.data(), kRoom) == 0, "rank", me);
    if (!what.in_place)
      CHECK(std::memcmp(nodes.arena(me, sources[me], what.shared), before[me].data(), kRoom) == 0, "rank", me);
    const auto [inside, across] = expected_traffic(what, nodes.nodes, me);
    Rank& rank = nodes.ranks[me];
    CHECK(rank.world->traffic().inside == traffic[me].first + inside, "rank", me);
    CHECK(rank.world->traffic().across == traffic[me].second + across, "rank", me);
    rank.buffer_bytes = std::max(rank.buffer_bytes, expected_buffer(what, nodes.nodes, me));
    CHECK(rank.buffer->bytes() == rank.buffer_bytes, "rank", me);
  }
}

// A receive buffer is either shared or not, so each world has exchanges of one kind.
void whatever_is_exchanged() {
  const std::vector<std::vector<int>> worlds = {
      {0}, {0, 0}, {0, 1}, {0, 0, 1, 1, 2}, {0, 1, 0, 1}, {0, 0, 0, 1, 2}, {0, 1, 1, 0, 2, 1}, {0, 0, 0, 0}};
  unsigned seed = 0;
  for (const std::vector<int>& world : worlds) {
    for (const bool shared : {true, false}) {
      Nodes nodes(world, kRoom);
      Random random(++seed);
      for (int turn = 0; turn < 12; ++turn) {
        What what = random_exchange(random, nodes.size());
        what.shared = shared;
        exchange_once(nodes, what, random, draw(random, 2) == 0 ? draw(random, nodes.size()) : -1);
      }
    }
  }
}

// Mean that is exchanged like other topologies, not as an all-reduce.
class EverybodyElse : public topology::Mean {
 public:
  using topology::Mean::Mean;
  bool is_mean_of_all() const override { return false; }
};

// The mean of all ranks has the same bits everywhere: the bits of the sum in the order of the participants.
template <class T>
void means_are_alike(DType dtype, const std::vector<int>& world) {
  constexpr std::size_t kCount = 7;
  Nodes nodes(world, kRoom);
  const auto size = static_cast<std::size_t>(nodes.size());
  const What what{std::make_shared<Layout>(std::vector<TensorSpec>{{"w", dtype, {kCount}}}, std::size_t{1} << 30),
                  std::make_shared<EverybodyElse>(nodes.size(), nodes.size()), true, false, true};
  const T large = std::ldexp(T(1), std::numeric_limits<T>::digits + 1);  // sums with it lose small values
  const T values[] = {large, T(1.7), -large, T(3), T(-2), T(0.5)};
  std::vector<std::shared_ptr<Handle>> handles;
  for (std::size_t me = 0; me < size; ++me) {
    auto* mine = reinterpret_cast<T*>(nodes.arena(me, 0, true));
    for (std::size_t i = 0; i < kCount; ++i) mine[i] = values[(me + i) % 6];
  }
  for (std::size_t me = 0; me < size; ++me)
    handles.push_back(nodes.submit(me, what, nodes.arena(me, 0, true), nodes.arena(me, 0, true)));
  for (std::size_t me = 0; me < size; ++me) {
    nodes.ranks[me].world->wait(*handles[me]);
    rethrow(*handles[me]);
  }
  bool order_matters = false;
  for (std::size_t i = 0; i < kCount; ++i) {
    T sum = 0, other = 0;
    for (std::size_t rank = 0; rank < size; ++rank) {
      sum += values[(rank + i) % 6];
      other += values[(size - 1 - rank + i) % 6];
    }
    order_matters |= sum != other;
    const T mean = sum * static_cast<T>(1.0 / static_cast<double>(size));
    for (std::size_t me = 0; me < size; ++me)
      CHECK(reinterpret_cast<T*>(nodes.arena(me, 0, true))[i] == mean, "rank", me, "element", i);
  }
  CHECK(order_matters);
}

Row copy_of(int source) {
  Row row;
  row.sources = {source};
  row.keeps_own = false;
  return row;
}

// A rank does not continue before its node peers have written all of its result. Ranks 0 and 1 of a node share the
// work. Rank 0 needs data that rank 2 of another node sends late. Meanwhile rank 1 stops before it has written its part
// of rank 0's result.
void all_shards_are_waited_for() {
  Nodes nodes({0, 0, 1}, kRoom);
  const auto layout =
      std::make_shared<Layout>(std::vector<TensorSpec>{{"w", DType::kFloat32, {1000}}}, std::size_t{1} << 30);
  const What what{layout, std::make_shared<Table>(3, Rows{{copy_of(2), copy_of(0), Row{}}}), true, false, true};
  std::vector<Bytes> before;
  Random random(1);
  for (std::size_t me = 0; me < 3; ++me) {
    std::byte* arena = nodes.arena(me, 0, true);
    fill(random, *layout, arena);
    before.emplace_back(arena, arena + layout->bytes());
  }
  const auto held = std::make_shared<Handle>();
  std::vector<std::shared_ptr<Handle>> handles;
  for (std::size_t me = 0; me < 3; ++me) {
    std::byte* arena = nodes.arena(me, 0, true);
    handles.push_back(nodes.submit(me, what, arena, arena, me == 2 ? held : nullptr));
  }
  std::this_thread::sleep_for(milliseconds(50));
  nodes.network.stop(1, true);
  std::this_thread::sleep_for(milliseconds(20));
  held->finish();
  nodes.ranks[2].world->wake();
  nodes.ranks[2].world->wait(*handles[2]);
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(!handles[0]->done());
  nodes.network.stop(1, false);
  for (const std::size_t me : {0, 1}) {
    nodes.ranks[me].world->wait(*handles[me]);
    rethrow(*handles[me]);
    CHECK(std::memcmp(nodes.arena(me, 0, true), before[me == 0 ? 2 : 0].data(), 4000) == 0);
  }
}

// A receive buffer is kept while it is large enough. When it must grow, it moves to the memory that the next exchange
// wants.
void receive_buffers_grow() {
  Nodes nodes({0}, kRoom);
  World& world = *nodes.ranks[0].world;
  ReceiveBuffer buffer(world.node_memory());
  std::byte* first = buffer.reserve(2, 100, true, nullptr);
  CHECK(buffer.bytes() == 200 && world.in_shared_memory(first, 200));
  CHECK(buffer.reserve(3, 50, true, nullptr) == first);
  std::byte* second = buffer.reserve(1, 1000, false, nullptr);
  CHECK(buffer.bytes() == 1000 && second != first && !world.in_shared_memory(second, 1000));
  CHECK(world.in_shared_memory(buffer.reserve(2, 1000, true, nullptr), 2000));
}

// An exchange that waits for another operation has no deadline of its own until that operation is done, and fails if
// that operation fails.
void what_comes_first_is_waited_for() {
  constexpr double kTimeout = 0.3;
  const auto layout =
      std::make_shared<Layout>(std::vector<TensorSpec>{{"w", DType::kFloat32, {10}}}, std::size_t{1} << 30);
  const auto table = [&](int size) {
    return What{layout, std::make_shared<Table>(size, Rows{std::vector<Row>(static_cast<std::size_t>(size))}), true,
                false, true};
  };
  Nodes alone({0}, kRoom, kTimeout);
  const auto first = std::make_shared<Handle>();
  const auto handle = alone.submit(0, table(1), alone.arena(0, 0, true), alone.arena(0, 0, true), first);
  std::this_thread::sleep_for(std::chrono::duration<double>(2 * kTimeout));
  CHECK(!handle->done());
  first->finish();
  alone.ranks[0].world->wake();
  alone.ranks[0].world->wait(*handle);
  CHECK(!handle->error);

  const auto fails = std::make_shared<Handle>();
  fails->finish(std::make_exception_ptr(DeviceError("the first has failed")));
  const auto failing = alone.submit(0, table(1), alone.arena(0, 0, true), alone.arena(0, 0, true), fails);
  alone.ranks[0].world->wait(*failing);
  CHECK_THROWS(DeviceError, rethrow(*failing));

  Nodes two({0, 0}, kRoom, kTimeout);
  const auto over = std::make_shared<Handle>();
  over->finish();
  const auto stuck = two.submit(0, table(2), two.arena(0, 0, true), two.arena(0, 0, true), over);
  const auto limit = steady_clock::now() + std::chrono::seconds(20);
  while (!stuck->done() && steady_clock::now() < limit) std::this_thread::sleep_for(milliseconds(5));
  CHECK(stuck->done());
  if (stuck->done()) CHECK_THROWS(Timeout, rethrow(*stuck));
}

}  // namespace

int main() {
  for (const std::vector<int>& world : std::vector<std::vector<int>>{{0, 0, 1, 1, 2}, {0, 1, 0, 2, 1, 0}, {0, 1, 2}}) {
    means_are_alike<float>(DType::kFloat32, world);
    means_are_alike<double>(DType::kFloat64, world);
  }
  whatever_is_exchanged();
  receive_buffers_grow();
  all_shards_are_waited_for();
  what_comes_first_is_waited_for();
  return sordino::test::report();
}
