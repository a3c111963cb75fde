// TrafficCounters: counts the bytes that a rank has sent, by receiver.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace sordino {

struct TrafficCounters {
  std::atomic<std::uint64_t> inside{0}, across{0};        // bytes within the node, and to other nodes
  std::atomic<std::uint64_t> operations{0}, one_shot{0};  // one_shot is included in operations

  // Starts or stops counting bytes by receiver, of which there are `ranks`.
  void open(bool opened, std::size_t ranks) {
    if (!room_) room_ = std::make_unique<std::atomic<std::uint64_t>[]>(ranks);
    ranks_ = ranks;
    to_.store(opened ? room_.get() : nullptr, std::memory_order_release);
  }
  // Bytes sent to each rank while they were counted.
  std::vector<std::uint64_t> by_rank() const { return {room_.get(), room_.get() + ranks_}; }

  // Counts an all-reduce within a node. As in a ring, each rank sends (N-1)/N of its input, and N-1 copies of its shard
  // of the result; these bytes are divided evenly among the others. `rank_of(place)`: rank at each of the N `places`.
  // `own`: place of this rank.
  template <class RankOf>
  void count_all_reduce(std::size_t bytes, std::size_t places, std::size_t own, RankOf&& rank_of) {
    const std::uint64_t sent = 2 * (bytes - bytes / places);
    inside.fetch_add(sent, std::memory_order_relaxed);
    std::atomic<std::uint64_t>* to = to_.load(std::memory_order_acquire);
    if (!to || places == 1) return;
    std::uint64_t rest = sent % (places - 1);
    for (std::size_t place = 0; place < places; ++place) {
      if (place == own) continue;
      to[rank_of(place)].fetch_add(sent / (places - 1) + (rest > 0), std::memory_order_relaxed);
      if (rest > 0) --rest;
    }
  }
  void count(const Transport& transport, int to, std::size_t bytes) {
    const auto& node_of = transport.node_of();
    const bool same_node = node_of[static_cast<std::size_t>(to)] == node_of[static_cast<std::size_t>(transport.rank())];
    (same_node ? inside : across).fetch_add(bytes, std::memory_order_relaxed);
    if (auto* each = to_.load(std::memory_order_acquire)) each[to].fetch_add(bytes, std::memory_order_relaxed);
  }

 private:
  std::unique_ptr<std::atomic<std::uint64_t>[]> room_;
  std::size_t ranks_ = 0;
  std::atomic<std::atomic<std::uint64_t>*> to_{nullptr};
};

}  // namespace sordino
