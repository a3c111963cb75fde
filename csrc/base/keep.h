// Intentional leaks.
#pragma once

#include <atomic>
#include <utility>

namespace sordino {

// Leaks `thing` on purpose, because it may be used after its owner is destroyed: by an abandoned transfer, or by a
// thread that only the parent of a forked process has. A list keeps it reachable, so leak checkers do not report it.
// Takes no lock, because a fork may have left a lock locked.
template <class T>
void leak_intentionally(T thing) {
  struct Kept {
    T thing;
    Kept* next;
  };
  static std::atomic<Kept*> newest{nullptr};
  auto* kept = new Kept{std::move(thing), newest.load()};
  while (!newest.compare_exchange_weak(kept->next, kept)) {
  }
}

}  // namespace sordino
