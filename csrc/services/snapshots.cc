#include "services/snapshots.h"

#include <cstring>

namespace sordino {
namespace {

std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// Copies between a place and private memory. The owner may write the place while a reader reads it; then `sequence` of
// the place shows that the copy is torn. Fences order the copy and `sequence`. C++ has no such copies: only single
// words may be read and written at the same time. But words of 8 bytes take up to twice as long, so only
// ThreadSanitizer, which also does not understand fences, gets them.
#if defined(__SANITIZE_THREAD__)
using Word64 = std::uint64_t;

void copy_in(std::byte* place, const std::byte* source, std::size_t bytes) {
  std::size_t at = 0;
  for (; at + sizeof(Word64) <= bytes; at += sizeof(Word64)) {
    Word64 word;
    std::memcpy(&word, source + at, sizeof(word));
    std::atomic_ref(*reinterpret_cast<Word64*>(place + at)).store(word, std::memory_order_release);
  }
  for (; at < bytes; ++at) std::atomic_ref(place[at]).store(source[at], std::memory_order_release);
}

void copy_out(std::byte* place, std::byte* destination, std::size_t bytes) {
  std::size_t at = 0;
  for (; at + sizeof(Word64) <= bytes; at += sizeof(Word64)) {
    const Word64 word = std::atomic_ref(*reinterpret_cast<Word64*>(place + at)).load(std::memory_order_acquire);
    std::memcpy(destination + at, &word, sizeof(word));
  }
  for (; at < bytes; ++at) destination[at] = std::atomic_ref(place[at]).load(std::memory_order_acquire);
}
#else
void copy_in(std::byte* place, const std::byte* source, std::size_t bytes) {
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(place, source, bytes);
}

void copy_out(const std::byte* place, std::byte* destination, std::size_t bytes) {
  std::memcpy(destination, place, bytes);
  std::atomic_thread_fence(std::memory_order_acquire);
}
#endif

}  // namespace

// `sequence` is odd while the place is written, and grows with each write. The other members describe the snapshot.
struct alignas(64) Snapshots::Place {
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> version, steps;
  std::atomic<Time::rep> published;  // node peers read the same clock

  Facts facts(std::memory_order order) const {
    return {version.load(order), steps.load(order), Time(Time::duration(published.load(order)))};
  }
};

struct Snapshots::Header {
  alignas(64) std::atomic<std::uint64_t> versions;  // number of snapshots published
  std::atomic<int> newest;                          // place of the newest; -1 before the first, and after close()
  Place places[kPlaces];
};

Snapshots::Snapshots(NodeMemory& memory, std::size_t bytes)
    : bytes_(bytes),
      stride_(aligned(bytes)),
      segment_(memory.allocate(aligned(sizeof(Header)) + kPlaces * stride_)),
      header_(reinterpret_cast<Header*>(segment_->data)) {
  header_->newest = -1;
}

std::byte* Snapshots::data_of(std::byte* base, int place) const {
  return base + aligned(sizeof(Header)) + static_cast<std::size_t>(place) * stride_;
}

std::uint64_t Snapshots::publish(const std::byte* source, std::uint64_t steps) {
  int chosen = -1;
  {
    std::lock_guard lock(mutex_);
    const int newest = header_->newest.load(std::memory_order_relaxed);
    for (int place = 0; place < kPlaces; ++place) {
      if (place == newest || pins_[static_cast<std::size_t>(place)] > 0) continue;
      // Takes the oldest place. So a reader that has just begun to copy the second newest has time to finish.
      const auto version = [this](int at) { return header_->places[at].version.load(std::memory_order_relaxed); };
      if (chosen < 0 || version(place) < version(chosen)) chosen = place;
    }
  }
  if (chosen < 0) return 0;
  Place& place = header_->places[chosen];
  const std::uint64_t sequence = place.sequence.load(std::memory_order_relaxed);
  place.sequence.store(sequence + 1, std::memory_order_relaxed);
  // All words below are written after `sequence`, and a reader reads them before it reads `sequence` again.
  const std::uint64_t version = header_->versions.load(std::memory_order_relaxed) + 1;
  place.version.store(version, std::memory_order_release);
  place.steps.store(steps, std::memory_order_release);
  place.published.store(std::chrono::steady_clock::now().time_since_epoch().count(), std::memory_order_release);
  copy_in(data_of(segment_->data, chosen), source, bytes_);
  place.sequence.store(sequence + 2, std::memory_order_release);
  std::lock_guard lock(mutex_);
  header_->versions.store(version, std::memory_order_relaxed);
  header_->newest.store(chosen, std::memory_order_release);
  return version;
}

int Snapshots::pin_newest() {
  std::lock_guard lock(mutex_);
  const int place = header_->newest.load(std::memory_order_relaxed);
  if (place >= 0) ++pins_[static_cast<std::size_t>(place)];
  return place;
}

void Snapshots::unpin(int place) {
  std::lock_guard lock(mutex_);
  --pins_[static_cast<std::size_t>(place)];
}

Snapshots::Facts Snapshots::facts(int place) const { return header_->places[place].facts(std::memory_order_relaxed); }

void Snapshots::close() { header_->newest.store(-1, std::memory_order_release); }

std::optional<Snapshots::Facts> Snapshots::copy_newest(std::byte* base, std::byte* destination) const {
  constexpr int kTries = 3;
  const auto* header = reinterpret_cast<const Header*>(base);
  for (int attempt = 0; attempt < kTries; ++attempt) {
    const int newest = header->newest.load(std::memory_order_acquire);
    if (newest < 0) return {};
    const Place& place = header->places[newest];
    const std::uint64_t before = place.sequence.load(std::memory_order_acquire);
    if (before % 2 == 1) continue;
    const Facts facts = place.facts(std::memory_order_acquire);
    copy_out(data_of(base, newest), destination, bytes_);
    if (place.sequence.load(std::memory_order_relaxed) == before) return facts;
  }
  return {};
}

}  // namespace sordino
