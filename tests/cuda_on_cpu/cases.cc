#include "cases.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "check.h"
#include "control.h"
#include "device/sim/sim_kernels.h"
#include "sanitizers.h"

namespace sordino::on_cpu_test {
namespace {

constexpr std::size_t kAtOnce = 6;  // cases

// Forbids or allows the bytes between the arrays of a case on a stream, so that AddressSanitizer sees reads of them.
void guard(const Case& one, std::byte* base, Stream stream, bool forbidden) {
#if defined(__SANITIZE_ADDRESS__)
  struct Gaps {
    std::vector<Case::Array> arrays;
    std::byte* base;
    std::size_t bytes;
    bool forbidden;
  };
  auto gaps = new Gaps{one.arrays, base, one.host.size(), forbidden};
  cuda_on_cpu_enqueue(
      reinterpret_cast<void*>(stream),
      [](void* argument) {
        const std::unique_ptr<Gaps> gaps(static_cast<Gaps*>(argument));
        if (!gaps->forbidden) return on_cpu::allow(gaps->base, gaps->bytes);
        on_cpu::forbid(gaps->base, gaps->bytes);
        for (const auto& array : gaps->arrays) on_cpu::allow(gaps->base + array.at, array.bytes);
      },
      gaps);
#else
  static_cast<void>(one), static_cast<void>(base), static_cast<void>(stream), static_cast<void>(forbidden);
#endif
}

}  // namespace

Random& dice() {
  static Random dice(1 + on_cpu::order());
  return dice;
}

bool Case::differ_in_sums(const std::byte* a, const std::byte* b, std::size_t count) {
  for (std::size_t k = 0; k < count; ++k) {
    double one = 0, other = 0;
    std::memcpy(&one, a + k * sizeof one, sizeof one);
    std::memcpy(&other, b + k * sizeof other, sizeof other);
    if (!(std::abs(one - other) <= 1e-10 * (1 + std::abs(other)))) return true;
  }
  return false;
}

Runner::Runner(std::shared_ptr<Device> device, std::size_t streams)
    : device_(std::move(device)), on_host_(sim::make_kernels()) {
  for (std::size_t k = 0; k < streams; ++k) streams_.push_back(device_->make_queue());
}

Runner::~Runner() {
  finish();
  for (const Stream stream : streams_) device_->drop_queue(stream);
}

void Runner::start(Case one) {
  if (running_.size() == kAtOnce) {
    compare(running_.front());
    running_.pop_front();
  }
  Running& running = running_.emplace_back(Running{std::move(one), {}, {}});
  const Case& here = running.one;
  const std::size_t bytes = here.host.size();
  running.found.resize(bytes);
  // The addresses of tensors must have the same alignment as on the host.
  const Stream in = any_stream(), at = any_stream(), out = any_stream();
  std::byte* base = device_->take(bytes, in);
  device_->copy(base, here.host.data(), bytes, in);
  guard(here, base, in, true);
  device_->wait(at, device_->record(in));
  here.work(device_->kernels(), base, at);
  device_->wait(out, device_->record(at));
  guard(here, base, out, false);
  device_->copy(running.found.data(), base, bytes, out);
  device_->give_back(base, out);
  running.end = device_->record(out);
}

void Runner::compare(Running& running) {
  while (!running.end->done()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  Case& one = running.one;
  const std::vector<std::byte> before = one.host;
  (one.reference ? one.reference : one.work)(*on_host_, one.host.data(), 0);
  std::size_t end = 0;
  for (const Case::Array& array : one.arrays) {
    const bool same = std::equal(before.begin() + static_cast<std::ptrdiff_t>(end),
                                 before.begin() + static_cast<std::ptrdiff_t>(array.at),
                                 running.found.begin() + static_cast<std::ptrdiff_t>(end));
    CHECK(same, one.name, "writes beside an array");
    CHECK(!array.differs(running.found.data() + array.at, one.host.data() + array.at, array.count), one.name);
    end = array.at + array.bytes;
  }
  CHECK(std::equal(before.begin() + static_cast<std::ptrdiff_t>(end), before.end(),
                   running.found.begin() + static_cast<std::ptrdiff_t>(end)),
        one.name, "writes behind the last array");
}

void Runner::finish() {
  for (Running& running : running_) compare(running);
  running_.clear();
}

}  // namespace sordino::on_cpu_test
