// Plan of an exchange: messages between ranks, and averages. All ranks of a node plan the same averages.
#pragma once

#include <vector>

#include "collectives/exchange.h"
#include "collectives/participants.h"
#include "kernels/mix.h"

namespace sordino {

// A segment on its way between nodes.
struct Parcel {
  int peer;          // index of the participant on the other node
  int here;          // index of the rank of this node that sends or receives it
  std::size_t copy;  // number of the copy in the receiver's buffer
};

// One group of the layout: its runs, its parcels between nodes, and the averages of this node's ranks.
struct GroupPlan {
  std::vector<const LayoutSegment*> runs;
  std::vector<Parcel> sends, receives;  // this rank's sends; the receives of all ranks of the node
  std::vector<kernels::Average> averages;
  // By run and rank of the node: offset of the run in a copy in that rank's buffer, if that rank receives it.
  std::vector<std::vector<std::size_t>> places;
};

class ExchangePlan {
 public:
  // Also counts the bytes that pass through shared memory as sent.
  ExchangePlan(Participants& participants, const Exchange& what, std::uint64_t round);

  const std::vector<GroupPlan>& groups() const { return groups_; }
  // Participants whose memory this rank reaches, itself included, in order; and its own place among them.
  const std::vector<int>& node() const { return node_; }
  std::size_t place() const { return place_; }
  bool together() const { return node_.size() > 1; }
  // Number of copies that this rank's receive buffer needs room for.
  std::size_t copies() const { return copies_; }
  // Bytes of a copy in the receive buffer of a rank of the node.
  std::size_t stride(std::size_t place) const { return strides_[place]; }

 private:
  bool here(int index) const;
  bool same_node(int a, int b) const;
  void fill(GroupPlan& plan, std::uint64_t round);
  void add(GroupPlan& plan, int place, const topology::Row& row);
  int participant(const GroupPlan& plan, int number) const;
  int number_of(GroupPlan& plan, int source, int needed_by);

  Participants& participants_;
  const Exchange& what_;
  std::vector<int> node_;
  std::size_t place_ = 0;
  std::vector<GroupPlan> groups_;
  std::size_t copies_ = 0;
  std::vector<std::size_t> strides_;
};

}  // namespace sordino
