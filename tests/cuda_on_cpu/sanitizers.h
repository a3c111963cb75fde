// What AddressSanitizer must be told: changes of stacks, and memory that a kernel may not touch.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace on_cpu {

#if defined(__SANITIZE_ADDRESS__)
inline void start_switch(void** save, const void* stack, std::size_t bytes) {
  __sanitizer_start_switch_fiber(save, stack, bytes);
}
inline void finish_switch(void* saved, const void** stack, std::size_t* bytes) {
  __sanitizer_finish_switch_fiber(saved, stack, bytes);
}
inline void forbid(const void* data, std::size_t bytes) { __asan_poison_memory_region(data, bytes); }
inline void allow(const void* data, std::size_t bytes) { __asan_unpoison_memory_region(data, bytes); }
#else
inline void start_switch(void**, const void*, std::size_t) {}
inline void finish_switch(void*, const void**, std::size_t*) {}
inline void forbid(const void*, std::size_t) {}
inline void allow(const void*, std::size_t) {}
#endif

}  // namespace on_cpu
