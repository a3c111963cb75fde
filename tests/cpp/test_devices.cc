// Memory of devices: no space left, the time at which shared memory is freed, and its reuse. Also the messages about
// GPUs that cannot be used.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <future>
#include <string>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "device/cuda/obstacles.h"
#include "device/sim/sim_device.h"
#include "transport/openers.h"
#include "transport/sim/sim.h"

namespace {

using namespace sordino;

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::shared_ptr<Device> device_with(std::size_t room) { return sim::make_device(0, {.room = room}); }

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

template <class Error, class Work>
std::string error_of(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void others_are_asked_to_make_room() {
  const auto device = device_with(8 * kMiB);
  std::byte* cached = device->allocate(6 * kMiB);
  int asked = 0;
  device->on_no_room([&] {
    ++asked;
    if (cached != nullptr) device->free(std::exchange(cached, nullptr));
  });
  device->free(device->allocate(kMiB));
  CHECK(asked == 0);
  std::byte* data = device->allocate(5 * kMiB);
  CHECK(asked == 1);
  device->free(data);
  cached = device->allocate(6 * kMiB);
  device->give_back(device->take(5 * kMiB, device->queue()), device->queue());
  CHECK(asked == 2);
  const std::string text = error_of<TransportError>([&] { device->take(9 * kMiB, device->queue()); });
  CHECK(asked == 3);
  CHECK(holds(text, "no room for 9437184 bytes on simulated device 0") && holds(text, "smaller model or batch"), text);
}

// A function that owns an object of Python takes Python's lock when it is copied or destroyed. Other threads hold that
// lock while they call the device, so taking it under the device's mutex would be a deadlock.
struct TakesLock {
  explicit TakesLock(Device& device) : device(device) {}
  TakesLock(const TakesLock& other) : device(other.device) { CHECK(!other.set || other_threads_go_on()); }
  ~TakesLock() { CHECK(!set || other_threads_go_on()); }
  void operator()() const {}

  bool other_threads_go_on() const {
    std::promise<void> done;
    std::future<void> over = done.get_future();
    std::thread other([this, done = std::move(done)]() mutable {
      device.free_when_unused(device.allocate(1), [] { return true; });
      done.set_value();
    });
    const bool went_on = over.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
    other.detach();
    return went_on;
  }

  Device& device;
  static inline bool set = false;  // a device has the function
};

void a_function_that_takes_a_lock_is_not_copied_under_the_mutex() {
  const auto device = device_with(kMiB);
  device->on_no_room(TakesLock(*device));
  TakesLock::set = true;
  CHECK(!error_of<TransportError>([&] { device->allocate(2 * kMiB); }).empty());
  device->on_no_room([] { throw Error("a graph is captured"); });
  TakesLock::set = false;
  const std::string text = error_of<TransportError>([&] { device->allocate(2 * kMiB); });
  CHECK(holds(text, "could not be released: a graph is captured. Use a smaller"), text);
}

// CUDA returns null for empty blocks, as it does without room.
void empty_blocks_need_no_room() {
  const auto device = device_with(kMiB);
  std::byte* data = device->take(0, device->queue());
  CHECK(data != nullptr);
  device->give_back(data, device->queue());
  data = device->allocate(0);
  CHECK(data != nullptr);
  device->free(data);
}

// Two ranks of one node; one maps the other's memory.
struct Pair {
  std::vector<std::unique_ptr<Transport>> ranks = sim::Network({0, 0}).transports();
  std::shared_ptr<Device> device = device_with(64 * kMiB);
  std::shared_ptr<Segment> segment = ranks[0]->node_memory().allocate_on(device, kMiB);

  void map() {
    const Location place = ranks[0]->node_memory().locate(segment->data, 1);
    std::byte* theirs = ranks[1]->node_memory().map(0, place, device);
    theirs[5] = std::byte{7};
    CHECK(segment->data[5] == std::byte{7});
  }
};

void shared_memory_goes_when_nobody_has_it_open() {
  Pair pair;
  pair.map();
  pair.segment = nullptr;
  CHECK(sim::occupied(*pair.device) == 2 * kMiB);  // kept for reuse in this world
  pair.ranks[0] = nullptr;
  CHECK(sim::occupied(*pair.device) == 2 * kMiB);  // the other rank has it open
  pair.ranks[1] = nullptr;
  pair.device->free_when_unused(pair.device->allocate(kMiB), [] { return true; });
  CHECK(sim::occupied(*pair.device) == 0);
}

void memory_that_was_closed_makes_room() {
  Pair pair;
  pair.map();
  pair.segment = nullptr;
  pair.ranks.clear();
  pair.device->free(pair.device->allocate(63 * kMiB));
  CHECK(sim::occupied(*pair.device) == 0);
}

void memory_outlives_its_world() {
  Pair pair;
  pair.map();
  pair.ranks.clear();
  CHECK(pair.segment->data[5] == std::byte{7});
  pair.segment = nullptr;
  CHECK(sim::occupied(*pair.device) == 0);
}

void who_has_died_has_nothing_open() {
  void* const shared = mmap(nullptr, sizeof(Openers), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const list = static_cast<Openers*>(shared);
  CHECK(list->none());
  Openers::Entry* mine = list->enter();
  CHECK(!list->none());
  if (fork() == 0) {
    Openers::leave(mine);  // must not remove the parent's entry
    _exit(0);
  }
  CHECK(wait(nullptr) > 0 && !list->none());
  Openers::leave(mine);
  CHECK(list->none());
  // An entry as a dead process leaves it.
  const pid_t child = fork();
  if (child == 0) _exit(0);
  CHECK(waitpid(child, nullptr, 0) == child);
  *list->enter() = child;
  CHECK(list->none());
  munmap(shared, sizeof(Openers));
}

void what_the_caller_still_does_is_waited_for() {
  Pair pair;
  const Stream stream = pair.device->make_queue();
  std::byte* const before = pair.segment->data;
  sim::enqueue(stream, [before] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::memset(before, 1, kMiB);
  });
  pair.segment = nullptr;
  pair.segment = pair.ranks[0]->node_memory().allocate_on(pair.device, kMiB);
  CHECK(pair.segment->data == before);
  pair.device->synchronize();
  CHECK(pair.segment->data[0] == std::byte{0});
  // Memory that only the device's own queue uses is separate: it needs no wait.
  const auto apart = pair.ranks[0]->node_memory().allocate_on(pair.device, kMiB, Use::kNobody);
  pair.segment = nullptr;
  CHECK(pair.ranks[0]->node_memory().allocate_on(pair.device, kMiB, Use::kNobody)->data != before);
}

void obstacles_name_cause_and_mend() {
  const std::string old = cuda::driver_too_old(12080, 13010);
  CHECK(holds(old, "up to 12.8") && holds(old, "built with CUDA 13.1") && holds(old, "update the driver") &&
            holds(old, "the nvcc of CUDA 12"),
        old);
  CHECK(holds(cuda::driver_too_old(0, 13000), "no CUDA driver"));
  const std::string volta =
      cuda::no_kernels_for("Tesla V100 (cuda:1)", 7, 0, "CUDA 13.0, sm_80 sm_90 + PTX", cuda::unloadable(209));
  CHECK(holds(volta, "Tesla V100 (cuda:1) has compute capability 7.0") &&
            holds(volta, "no kernels for it (CUDA error 209: there is no code for this GPU)") &&
            holds(volta, "sm_80 sm_90 + PTX") && holds(volta, "SORDINO_CUDA_ARCHITECTURES=70"),
        volta);
  for (const int code : {98, 200, 209, 218, 221, 222, 223}) {
    CHECK(holds(cuda::unloadable(code), "CUDA error " + std::to_string(code) + ": "), code);
  }
  for (const int code : {0, 2, 100, 700, 719}) CHECK(cuda::unloadable(code).empty(), code);
}

// ---- temporary memory of a device without memory pools -------------------------------------------------------------

std::shared_ptr<Device> device_without_pools(std::size_t room) {
  return sim::make_device(0, {.pools = false, .room = room});
}

// Work on a queue that lasts until end() or the destructor.
class Work {
 public:
  explicit Work(Stream queue) {
    sim::enqueue(queue, [over = over_] { over->wait(false); });
  }
  ~Work() { end(); }
  void end() {
    *over_ = true;
    over_->notify_all();
  }

 private:
  std::shared_ptr<std::atomic<bool>> over_ = std::make_shared<std::atomic<bool>>(false);
};

void wait_for(Device& device, Stream queue) {
  const auto event = device.record(queue);
  while (!event->done()) std::this_thread::yield();
}

void a_block_is_used_again_after_its_work() {
  const auto device = device_without_pools(16 * kMiB);
  const Stream one = device->make_queue(), other = device->make_queue();
  std::byte* const block = device->take(kMiB, one);
  Work work(one);
  device->give_back(block, one);
  std::byte* const second = device->take(kMiB, other);
  CHECK(second != block);                          // the block's work is not over
  CHECK(device->take(kMiB - 1000, one) == block);  // in the order of the queue
  device->give_back(block, one);
  work.end();
  wait_for(*device, one);
  CHECK(device->take(100, other) != block);  // too large
  CHECK(device->take(kMiB, other) == block);
}

// Freeing waits for the whole device, so neither giving a block back nor taking one frees any.
void blocks_are_freed_only_where_there_is_no_room() {
  const auto device = device_without_pools(8 * kMiB);
  const Stream one = device->make_queue(), other = device->make_queue();
  std::byte* const block = device->take(4 * kMiB, one);
  Work work(one);
  device->give_back(block, one);
  CHECK(!error_of<TransportError>([&] { device->take(8 * kMiB, other); }).empty());  // the block has work
  CHECK(sim::occupied(*device) == 4 * kMiB);
  work.end();
  wait_for(*device, one);
  CHECK(sim::occupied(*device) == 4 * kMiB);
  device->give_back(device->take(8 * kMiB, other), other);
  CHECK(sim::occupied(*device) == 8 * kMiB);
}

}  // namespace

int main() {
  others_are_asked_to_make_room();
  a_function_that_takes_a_lock_is_not_copied_under_the_mutex();
  empty_blocks_need_no_room();
  shared_memory_goes_when_nobody_has_it_open();
  memory_that_was_closed_makes_room();
  memory_outlives_its_world();
  who_has_died_has_nothing_open();
  what_the_caller_still_does_is_waited_for();
  obstacles_name_cause_and_mend();
  a_block_is_used_again_after_its_work();
  blocks_are_freed_only_where_there_is_no_room();
  return test::report();
}
