#include "transport/shm/shm_link.h"

#include <algorithm>

namespace sordino::shm {

ShmLink::ShmLink(ShmMemory& memory, std::vector<int> here, int self, const std::vector<std::byte*>& boxes)
    : here_(std::move(here)),
      mailboxes_(here_, index_of(self), boxes),
      pipes_(
          memory, here_,
          [this](int to, const Location& place) { mailboxes_.post_inner(to, Writer().put(place).take()); },
          [this](int index) { mailboxes_.bell(index).ring(); }) {}

void ShmLink::open_pipe(int from, std::span<const std::byte> message) {
  const auto place = Reader(message).get<Location>();
  try {
    pipes_.open(index_of(from), place);
  } catch (const MemoryGone& error) {  // the rank has ended meanwhile, or is in another process namespace
    losses_.push_back({from, error.what(), false});
  }
}

bool ShmLink::poll(const Sink& sink) {
  const bool moved = pipes_.poll();
  return mailboxes_.poll(sink, open_pipe_) || moved;
}

int ShmLink::index_of(int rank) const {
  const auto found = std::lower_bound(here_.begin(), here_.end(), rank);
  return found != here_.end() && *found == rank ? static_cast<int>(found - here_.begin()) : -1;
}

}  // namespace sordino::shm
