// Snapshots of some memory, which other ranks read at any time: three places in one segment. One place holds the newest
// snapshot, another may be in flight to another node, and the next snapshot goes to the third. A node peer maps the
// segment and copies a snapshot itself. If the sequence number of the place shows that the owner began to overwrite it
// meanwhile, the peer repeats the copy.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "base/time.h"
#include "transport/node_memory.h"

namespace sordino {

class Snapshots {
 public:
  static constexpr int kPlaces = 3;

  // Facts about a snapshot, written by its owner.
  struct Facts {
    std::uint64_t version;  // number of publications up to this one
    std::uint64_t steps;
    Time published;
  };

  // Snapshots of `bytes` bytes each. Throws TransportError if there is no memory.
  Snapshots(NodeMemory& memory, std::size_t bytes);

  const std::shared_ptr<Segment>& segment() const { return segment_; }

  // Copies `source` to the oldest free place. Returns its version, or 0 if no place is free. Called by one thread at a
  // time.
  std::uint64_t publish(const std::byte* source, std::uint64_t steps);
  // Returns the place of the newest snapshot, which is not overwritten before unpin(). -1 if there is no snapshot.
  int pin_newest();
  void unpin(int place);
  const std::byte* data(int place) const { return data_of(segment_->data, place); }
  Facts facts(int place) const;
  // Withdraws the newest snapshot, so that no peer takes the last one for a new one.
  void close();

  // Copies the newest snapshot of a node peer, whose segment is mapped at `base`. Returns nothing if the peer has no
  // snapshot, or publishes faster than this rank reads.
  std::optional<Facts> copy_newest(std::byte* base, std::byte* destination) const;

 private:
  struct alignas(64) Place;
  struct Header;
  std::byte* data_of(std::byte* base, int place) const;

  const std::size_t bytes_, stride_;
  const std::shared_ptr<Segment> segment_;
  Header* const header_;
  std::mutex mutex_;  // guards the state that publish() shares with pin_newest() and unpin()
  std::array<int, kPlaces> pins_{};
};

}  // namespace sordino
