// What stays for ever.
#pragma once

#include <atomic>
#include <utility>

namespace sordino {

// Never destroys `thing`, which somebody may touch when whoever owned it is gone: a transfer that was given up, or a
// thread that only the parent of a forked process has. Who looks for leaks finds it in a list. Takes no lock, for a
// fork may have left one locked.
template <class T>
void keep_for_ever(T thing) {
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
