// Intentional leaks.
#pragma once

#include <atomic>
#include <utility>

namespace sordino {

// Leaks `thing` on purpose, because it may be used after its owner is gone: by a transfer that was given up, or by a
// thread that only the parent of a forked process has. A leak checker finds it in a list. Takes no lock, because a fork
// may have left one locked.
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
