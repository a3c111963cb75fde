// A case: some arrays in one piece of memory, and work on them. The work runs on a copy in device memory and on a copy
// on the host, and the arrays are compared.
//
// On the device, the piece is copied to memory of a pool on one stream, worked on on another one, and copied back on a
// third one, with events in between. So several cases are under way at once, on streams that overtake each other.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "block.h"
#include "device/device.h"
#include "kernels_fixture.h"

namespace sordino::on_cpu_test {

using on_cpu::Random;

// Random choices of the cases.
Random& dice();

class Case {
 public:
  // Work gets the place at which the arrays begin. It runs twice: on the device, and with the CPU's kernels.
  using Work = std::function<void(Kernels&, std::byte* base, Stream)>;

  explicit Case(std::string name) : name(std::move(name)) {}

  // Adds an array of `count` elements that begins `phase` bytes after a multiple of 64. Returns its offset.
  template <class T>
  std::size_t add(std::size_t count, std::size_t phase, bool ordinary = false) {
    const std::size_t at = reserve(count * sizeof(T), phase);
    const std::vector<T>& values = ordinary ? ordinary_elements<T>() : any_elements<T>();
    std::size_t next = dice().below(values.size());
    for (std::size_t done = 0; done < count; next = 0) {
      const std::size_t some = std::min(count - done, values.size() - next);
      std::memcpy(host.data() + at + done * sizeof(T), values.data() + next, some * sizeof(T));
      done += some;
    }
    arrays.push_back({at, count, count * sizeof(T), &differ<T>});
    return at;
  }
  // Adds an array for sums, which may differ in their last bits.
  std::size_t add_sums(std::size_t count) {
    const std::size_t at = reserve(count * sizeof(double), 0);
    arrays.push_back({at, count, count * sizeof(double), &differ_in_sums});
    return at;
  }
  // Bytes of the array that was added with this offset.
  template <class T>
  T* on_host(std::size_t offset) {
    return reinterpret_cast<T*>(host.data() + offset);
  }

  struct Array {
    std::size_t at, count, bytes;
    bool (*differs)(const std::byte* a, const std::byte* b, std::size_t count);
  };
  std::string name;
  std::vector<std::byte> host;
  std::vector<Array> arrays;
  Work work;
  Work reference;  // instead of `work` on the host, if there is any

 private:
  static constexpr std::size_t kGuard = 64, kElements = 10'007;
  std::size_t reserve(std::size_t bytes, std::size_t phase) {
    const std::size_t at = (host.size() + kGuard + 63) / 64 * 64 + phase;
    host.resize(at + bytes + kGuard);
    std::memset(host.data() + at + bytes, 0xa5, kGuard);
    return at;
  }
  // Random elements, of which arrays take a part each.
  template <class T>
  static const std::vector<T>& any_elements() {
    static const std::vector<T> all = [] {
      std::vector<T> made(kElements);
      for (T& value : made) value = test::random_element<T>();
      return made;
    }();
    return all;
  }
  // Numbers whose sums are finite, and exact in most types.
  template <class T>
  static const std::vector<T>& ordinary_elements() {
    if constexpr (!test::is_float<T>) {
      return any_elements<T>();
    } else {
      static const std::vector<T> all = [] {
        std::vector<T> made(kElements);
        for (T& value : made) test::from_double((static_cast<double>(dice().below(4001)) - 2000) / 128, value);
        return made;
      }();
      return all;
    }
  }
  template <class T>
  static bool differ(const std::byte* a, const std::byte* b, std::size_t count) {
    if (count == 0 || std::memcmp(a, b, count * sizeof(T)) == 0) return false;
    for (std::size_t k = 0; k < count; ++k) {
      T one, other;
      std::memcpy(&one, a + k * sizeof(T), sizeof(T));
      std::memcpy(&other, b + k * sizeof(T), sizeof(T));
      if (!test::same(one, other)) return true;
    }
    return false;
  }
  static bool differ_in_sums(const std::byte* a, const std::byte* b, std::size_t count);
};

// Runs cases, several at a time.
class Runner {
 public:
  Runner(std::shared_ptr<Device> device, std::size_t streams);
  ~Runner();  // waits for all cases

  void start(Case one);
  void finish();

 private:
  struct Running {
    Case one;
    std::vector<std::byte> found;
    std::shared_ptr<Event> end;
  };
  Stream any_stream() { return streams_[dice().below(streams_.size())]; }
  void compare(Running& running);

  std::shared_ptr<Device> device_;
  std::unique_ptr<Kernels> on_host_;
  std::vector<Stream> streams_;
  std::deque<Running> running_;
};

// The cases of each family of kernels. `thorough`: more of them.
void start_element_cases(Runner& runner, bool thorough);
void start_sum_cases(Runner& runner, bool thorough);
void start_copy_cases(Runner& runner, bool thorough);
void start_mix_cases(Runner& runner, bool thorough);
void start_item_cases(Runner& runner, bool thorough);
void start_codec_cases(Runner& runner, bool thorough);

// Bytes between a multiple of 64 and tensor number `index` of a row. Kinds: 0 aligned, 1 all alike, 2 all different.
inline std::size_t phase_of(int kind, std::size_t index, std::size_t size) {
  return kind == 0 ? 0 : (3 + (kind == 2 ? index + dice().below(4) : 0)) * size % 64;
}

// Numbers of elements around every limit: the width of an access, and the chunks of small calls, large calls and sums.
inline std::vector<std::size_t> counts_around_limits(std::size_t size) {
  std::vector<std::size_t> counts{0, 1};
  for (const std::size_t bytes :
       {std::size_t{16}, std::size_t{32}, std::size_t{4} << 10, std::size_t{16} << 10, std::size_t{32} << 10}) {
    const std::size_t count = bytes / size;
    counts.insert(counts.end(), {count - 1, count, count + 1});
  }
  counts.push_back((std::size_t{4} << 10) * 3 / size + 7);
  return counts;
}

}  // namespace sordino::on_cpu_test
