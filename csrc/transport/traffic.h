// How much a rank has sent, by who gets it.
#pragma once

#include <atomic>
#include <cstdint>

#include "transport/transport.h"

namespace sordino {

struct Traffic {
  std::atomic<std::uint64_t> inside{0}, across{0};        // bytes within the node, and to others
  std::atomic<std::uint64_t> operations{0}, one_shot{0};  // the latter are among the former

  // Of an all-reduce within a node: as in a ring each rank gives away (N-1)/N of its input, and N-1 copies of its shard
  // of the result.
  void count_all_reduce(std::size_t bytes, std::size_t ranks) {
    inside.fetch_add(2 * (bytes - bytes / ranks), std::memory_order_relaxed);
  }
  void count(const Transport& transport, int to, std::size_t bytes) {
    const auto& node_of = transport.node_of();
    const bool same_node = node_of[static_cast<std::size_t>(to)] == node_of[static_cast<std::size_t>(transport.rank())];
    (same_node ? inside : across).fetch_add(bytes, std::memory_order_relaxed);
  }
};

}  // namespace sordino
