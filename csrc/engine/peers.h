// The other ranks of a world: which of them have left, and messages to the remaining ones.
#pragma once

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "engine/departure.h"
#include "transport/transport.h"

namespace sordino {

// Used by the polling thread only, apart from tolerates_losses().
class Peers {
 public:
  explicit Peers(Transport& transport)
      : transport_(transport),
        gone_(static_cast<std::size_t>(transport.size())),
        departures_(static_cast<std::size_t>(transport.size())) {}

  bool gone(int rank) const { return gone_[static_cast<std::size_t>(rank)]; }
  // Notes that a rank has left. `how` ("has shut down") and `cause` (" because of ValueError: no") go into errors.
  // `lost`: the ranks that the cause names as lost, if any. A later call for the rank is ignored unless it has a cause.
  void note_left(int rank, const std::string& how, const std::string& cause = "", std::vector<int> lost = {}) {
    if (gone(rank) && cause.empty()) return;
    gone_[static_cast<std::size_t>(rank)] = true;
    std::erase(lost, transport_.rank());
    if (lost.empty()) lost = {rank};
    departures_[static_cast<std::size_t>(rank)] = {"rank " + std::to_string(rank) + ", which " + how + cause,
                                                   std::move(lost)};
  }
  // The departure of a rank that has left.
  const Departure& departure(int rank) const { return departures_[static_cast<std::size_t>(rank)]; }

  // From now on the loss of a rank fails only the operations that need that rank, and the world continues.
  void tolerate_losses() {
    tolerates_losses_ = true;
    transport_.tolerate_losses();
  }
  bool tolerates_losses() const { return tolerates_losses_.load(); }  // from any thread

  // Posts a message. This and the next functions skip this rank itself, and ranks that have left.
  void post(int to, const Bytes& message) {
    if (to != transport_.rank() && !gone(to)) transport_.post(to, message);
  }
  void post_to(const std::vector<int>& ranks, const Bytes& message) {
    for (const int rank : ranks) post(rank, message);
  }
  void post_to_all(const Bytes& message) {
    for (int rank = 0; rank < transport_.size(); ++rank) post(rank, message);
  }
  void post_to_node(const Bytes& message) {
    const auto& node_of = transport_.node_of();
    for (int rank = 0; rank < transport_.size(); ++rank) {
      if (node_of[static_cast<std::size_t>(rank)] == node_of[static_cast<std::size_t>(transport_.rank())])
        post(rank, message);
    }
  }

 private:
  Transport& transport_;
  std::vector<bool> gone_;
  std::vector<Departure> departures_;
  std::atomic<bool> tolerates_losses_{false};
};

}  // namespace sordino
