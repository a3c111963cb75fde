#include "control.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>

namespace on_cpu {
namespace {

std::atomic<unsigned>& seed() {
  static std::atomic<unsigned> seed = static_cast<unsigned>(setting("CUDA_ON_CPU_ORDER", 0));
  return seed;
}

// Written when the process ends, unless it is killed.
struct Calls {
  std::mutex mutex;
  std::map<std::string, unsigned long> counts;
  static void write();
};
Calls& calls() {
  static auto* all = [] {
    std::atexit(&Calls::write);
    return new Calls;
  }();
  return *all;
}
void Calls::write() {
  const char* folder = std::getenv("CUDA_ON_CPU_CALLS");
  if (folder == nullptr) return;
  std::lock_guard lock(calls().mutex);
  std::ofstream file(std::string(folder) + "/calls." + std::to_string(getpid()));
  for (const auto& [function, count] : calls().counts) file << function << ' ' << count << '\n';
}

}  // namespace

void fault(const std::string& what) {
  std::fprintf(stderr, "CUDA on the CPU: %s\n", what.c_str());
  std::fflush(nullptr);
  std::abort();
}

std::size_t setting(const char* name, std::size_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 0) : otherwise;
}

bool pretends() {
  static const bool pretends = setting("CUDA_ON_CPU_PRETEND", 0) != 0;
  return pretends;
}

unsigned order() { return seed(); }
void set_order(unsigned value) { seed() = value; }

void called(const char* function) {
  std::lock_guard lock(calls().mutex);
  ++calls().counts[function];
}

}  // namespace on_cpu
