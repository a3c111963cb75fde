// Prefetch of a cache line that this processor will write.
#pragma once

#include <cstddef>

namespace sordino {

// If another processor has read the line since it was last written, a store waits until that processor gives it up.
// Always inlined, because files of several instruction set levels use it.
[[gnu::always_inline]] inline void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
  // Without -mprfchw, GCC makes __builtin_prefetch fetch the line to read, which does not help. All x86-64 processors
  // accept this instruction. Old ones ignore it.
  asm volatile("prefetchw %0" ::"m"(*static_cast<const std::byte*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

}  // namespace sordino
