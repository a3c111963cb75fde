#include "kernels/publish.h"

#include <algorithm>
#include <chrono>

#include "kernels/cpu/stores.h"

namespace sordino::kernels {
namespace {

constexpr std::size_t kLeastTimed = 16 * 1024;  // in bytes; stores of smaller copies may end after the timer

StoreChoice choice;

enum class Fixed { kNo, kOrdinary, kStreaming };
std::atomic<Fixed> fixed = kCanStream ? Fixed::kNo : Fixed::kOrdinary;

}  // namespace

float StoreChoice::least(const Way& way) {
  float found = way.times[0].load(std::memory_order_relaxed);
  for (const auto& time : way.times) found = std::min(found, time.load(std::memory_order_relaxed));
  return found;
}

StoreChoice::Plan StoreChoice::plan() {
  const bool current = streaming();
  const std::uint32_t number = copies_.fetch_add(1, std::memory_order_relaxed);
  const bool untried = ways_[!current].count.load(std::memory_order_relaxed) < kSamples;
  const bool other = number % (untried ? 2 : kTriedEvery) == 1;
  return {other ? !current : current, untried || other || number % kTimedEvery == 0};
}

void StoreChoice::took(bool streaming, std::size_t bytes, double nanoseconds) {
  Way& way = ways_[streaming];
  const std::uint32_t number = way.count.fetch_add(1, std::memory_order_relaxed);
  way.times[number % kSamples].store(static_cast<float>(nanoseconds / static_cast<double>(bytes)),
                                     std::memory_order_relaxed);
  for (const Way& one : ways_) {
    if (one.count.load(std::memory_order_relaxed) < kSamples) return;
  }
  streaming_.store(least(ways_[false]) > kWorthIt * least(ways_[true]), std::memory_order_relaxed);
}

void publish(std::byte* to, const std::byte* from, std::size_t bytes) {
  const auto copy = [&](bool streaming) {
    if (!streaming) return copy_to_read_lines(to, from, bytes);
    stream(to, from, bytes);
    streamed();
  };
  if (bytes < kLeastTimed || fixed.load(std::memory_order_relaxed) != Fixed::kNo)
    return copy(bytes >= kLeastStreamed && streams());
  const StoreChoice::Plan plan = choice.plan();
  if (!plan.timed) return copy(plan.streaming);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  copy(plan.streaming);
  choice.took(plan.streaming, bytes, std::chrono::duration<double, std::nano>(Clock::now() - start).count());
}

bool streams() {
  const Fixed way = fixed.load(std::memory_order_relaxed);
  return way == Fixed::kNo ? choice.streaming() : way == Fixed::kStreaming;
}

void set_streams(std::optional<bool> streams) {
  if (kCanStream) fixed = !streams ? Fixed::kNo : *streams ? Fixed::kStreaming : Fixed::kOrdinary;
}

}  // namespace sordino::kernels
