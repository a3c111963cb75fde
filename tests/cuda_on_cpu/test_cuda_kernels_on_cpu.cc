// The CUDA kernels, run by the stand-in, against the CPU's: all types, sizes around every limit, misaligned addresses,
// threads and blocks in random orders, several streams.
//
//   test_cuda_kernels_on_cpu [--thorough] [SEED...]
//
// Without seeds: 0 (threads in order) and 1.
#include <cstdlib>
#include <cstring>

#include "cases.h"
#include "check.h"
#include "control.h"
#include "device/cuda/cuda_device.h"

extern "C" const sordino::cuda::Plugin* sordino_cuda_plugin();

int main(int count, char** words) {
  using namespace sordino;
  using namespace sordino::on_cpu_test;
  bool thorough = false;
  std::vector<unsigned> seeds;
  for (int k = 1; k < count; ++k) {
    if (std::strcmp(words[k], "--thorough") == 0) {
      thorough = true;
    } else {
      seeds.push_back(static_cast<unsigned>(std::strtoul(words[k], nullptr, 0)));
    }
  }
  if (seeds.empty()) seeds = {0, 1};
  const auto device = sordino_cuda_plugin()->make_device(0);
  for (const unsigned seed : seeds) {
    on_cpu::set_order(seed);
    dice() = Random(seed);
    for (unsigned skipped = 0; skipped < 1000 * seed; ++skipped) test::random_bits();
    Runner runner(device, 5);
    start_element_cases(runner, thorough);
    start_sum_cases(runner, thorough);
    start_copy_cases(runner, thorough);
    start_mix_cases(runner, thorough);
    start_item_cases(runner, thorough);
    start_codec_cases(runner, thorough);
  }
  CHECK(on_cpu::occupied() == 0, on_cpu::occupied(), "bytes are still allocated");
  const auto counters = on_cpu::counters();
  std::cout << counters.launches << " launches of " << counters.blocks << " blocks of " << counters.threads
            << " threads, " << counters.barriers << " waits at barriers, " << counters.exchanges << " exchanges\n";
  return test::report();
}
