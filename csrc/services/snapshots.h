// Where the snapshots of some memory lie that others take whenever they like: three places in one segment. One holds
// the newest, one may be on its way to another node, and into the third goes the next. A node peer that maps the
// segment copies a snapshot itself, and does so again if its owner has begun to write there meanwhile: the version
// beside it tells.
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

  // What its owner has said of a snapshot.
  struct Facts {
    std::uint64_t version;  // how often it had published
    std::uint64_t steps;
    Time published;
  };

  // Snapshots of so many bytes. Throws TransportError without memory.
  Snapshots(NodeMemory& memory, std::size_t bytes);

  const std::shared_ptr<Segment>& segment() const { return segment_; }

  // Copies `source` to the oldest place that is free, and gives its version; 0 if no place is free. From one thread at
  // a time.
  std::uint64_t publish(const std::byte* source, std::uint64_t steps);
  // The place of the newest, which is not written before unpin(); -1 before the first.
  int pin_newest();
  void unpin(int place);
  const std::byte* data(int place) const { return data_of(segment_->data, place); }
  Facts facts(int place) const;
  // Nobody takes for new what will never change.
  void close();

  // Copies the newest one of a node peer's, whose segment is mapped here. None if it has published nothing yet, or
  // writes faster than this rank reads.
  std::optional<Facts> copy_newest(std::byte* base, std::byte* destination) const;

 private:
  struct alignas(64) Place;
  struct Header;
  std::byte* data_of(std::byte* base, int place) const;

  const std::size_t bytes_, stride_;
  const std::shared_ptr<Segment> segment_;
  Header* const header_;
  std::mutex mutex_;  // guards what publish() shares with who pins
  std::array<int, kPlaces> pins_{};
};

}  // namespace sordino
