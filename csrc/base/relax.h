// Pause of one iteration of a spin loop.
#pragma once

namespace sordino {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace sordino
