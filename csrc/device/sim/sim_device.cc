#include "device/sim/sim_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <semaphore>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "device/block_cache.h"
#include "device/sim/sim_kernels.h"

namespace sordino::sim {
namespace {

using Failed = std::shared_ptr<std::atomic<bool>>;

void refuse_if(const Failed& failed) {
  if (*failed) throw DeviceError("the simulated device has failed");
}

class SimEvent : public Event {
 public:
  explicit SimEvent(Failed failed) : failed_(std::move(failed)) {}
  bool done() override {
    refuse_if(failed_);
    return reached_.load(std::memory_order_acquire);
  }
  void reach() {
    reached_.store(true, std::memory_order_release);
    reached_.notify_all();
  }
  void wait() const { reached_.wait(false); }

 private:
  const Failed failed_;
  std::atomic<bool> reached_{false};
};

// The queues of the hardware. A queue of the device occupies one while a piece of its work runs or waits.
using Hardware = std::counting_semaphore<>;

class Queue {
 public:
  explicit Queue(std::shared_ptr<Hardware> hardware) : hardware_(std::move(hardware)), thread_([this] { run(); }) {}
  ~Queue() {
    put(nullptr);
    thread_.join();
  }
  void put(std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
    }
    changed_.notify_one();
  }
  std::atomic<bool> captured = false;

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      if (!work) return;
      // The delay reveals missing waits: a reader that does not wait sees old values. A few long delays also reveal
      // readers and writers that do something else first.
      std::this_thread::sleep_for(std::chrono::microseconds(++done_ % kVeryLate == 0 ? 1000 : 20));
      hardware_->acquire();
      work();
      hardware_->release();
    }
  }

  static constexpr std::uint64_t kVeryLate = 13;  // every 13th piece of work

  const std::shared_ptr<Hardware> hardware_;
  std::uint64_t done_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::thread thread_;
};

// All queues, by numbers that are never reused. So a use of a dropped queue, undefined on a GPU, is an error.
class Queues {
 public:
  Stream add(std::shared_ptr<Hardware> hardware) {
    auto made = std::make_unique<Queue>(std::move(hardware));
    std::lock_guard lock(mutex_);
    all_[++newest_] = std::move(made);
    return newest_;
  }
  // Waits for the work on the queue.
  void drop(Stream stream) {
    std::unique_ptr<Queue> dropped;
    std::lock_guard lock(mutex_);
    const auto found = all_.find(stream);
    if (found == all_.end()) throw DeviceError("a simulated queue was dropped twice");
    dropped = std::move(found->second);
    all_.erase(found);
  }
  // Calls `use` with the queue. Throws DeviceError if the queue was dropped or never existed.
  template <class Use>
  void with(Stream stream, const Use& use) {
    std::lock_guard lock(mutex_);
    const auto found = all_.find(stream);
    if (found == all_.end()) throw DeviceError("a simulated queue was used after it was dropped");
    use(*found->second);
  }

 private:
  std::mutex mutex_;
  std::map<Stream, std::unique_ptr<Queue>> all_;
  Stream newest_ = 0;
};

// Never destroyed: devices may live until the end of the process.
Queues& queues() {
  static auto* const all = new Queues;
  return *all;
}

// Contents of a ticket.
struct Address {
  pid_t pid;
  int descriptor;
  std::size_t bytes;
};
static_assert(sizeof(Address) <= sizeof(Ticket));

class SimDevice : public Device {
 public:
  SimDevice(int ordinal, Traits traits)
      : ordinal_(ordinal),
        traits_(traits),
        kernels_(make_kernels()),
        hardware_(std::make_shared<Hardware>(traits.hardware_queues)),
        queue_(queues().add(hardware_)) {}
  ~SimDevice() override {
    for (const Stream queue : further_) queues().drop(queue);  // work on queues uses the blocks
    queues().drop(queue_);
    for (const auto& [data, bytes] : taken_) delete[] data;  // blocks that the cache holds
    for (auto& [data, block] : blocks_) discard(data, block);
  }

  int ordinal() const override { return ordinal_; }
  std::string name() const override { return "simulated device " + std::to_string(ordinal_); }
  std::uint64_t identity() const override { return 0x51d0000u + static_cast<std::uint64_t>(ordinal_); }
  Kernels& kernels() override { return *kernels_; }
  std::shared_ptr<void> use() override { return nullptr; }
  bool capturing(Stream stream) override {
    bool captured = false;
    if (stream != 0) queues().with(stream, [&](const Queue& queue) { captured = queue.captured; });
    return captured;
  }
  bool takes_nccl() const override { return traits_.takes_nccl; }
  Stream queue() const override { return queue_; }

  Stream make_queue() override {
    const Stream made = queues().add(hardware_);
    std::lock_guard lock(mutex_);
    further_.insert(made);
    return made;
  }
  void drop_queue(Stream queue) noexcept override {
    {
      std::lock_guard lock(mutex_);
      further_.erase(queue);
    }
    queues().drop(queue);
  }

  void fail() { *failed_ = true; }
  std::size_t occupied() const {
    std::lock_guard lock(mutex_);
    return occupied_;
  }
  int hardware_queues() const override { return traits_.hardware_queues; }
  std::byte* try_allocate(std::size_t bytes) override {
    if (bytes == 0 || !occupy(bytes)) return nullptr;  // null for 0 bytes, as with CUDA
    const int descriptor = memfd_create("sordino-device", MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
      throw TransportError("no memory on " + name());
    }
    std::byte* data = map(descriptor, bytes);
    std::lock_guard lock(mutex_);
    blocks_[data] = {descriptor, bytes, bytes};
    return data;
  }
  void free(std::byte* data) noexcept override {
    synchronize();  // as CUDA does
    std::lock_guard lock(mutex_);
    const auto block = blocks_.find(data);
    if (block == blocks_.end()) return;
    occupied_ -= block->second.occupies;
    discard(data, block->second);
    blocks_.erase(block);
  }
  std::byte* try_take(std::size_t bytes, Stream stream) override {
    if (bytes == 0) return nullptr;
    return traits_.pools ? occupy_block(bytes) : cache_.take(bytes, stream);
  }
  void give_back(std::byte* data, Stream stream) noexcept override {
    if (!traits_.pools) return cache_.give_back(data, stream);
    leave_block(data);
    enqueue(stream, [data] { delete[] data; });
  }
  void clear(std::byte* data, std::size_t bytes) override { std::memset(data, 0, bytes); }

  Ticket share(const std::byte* data) override {
    if (!traits_.shares) throw TransportError(name() + " does not share its memory");
    std::lock_guard lock(mutex_);
    const Block& block = blocks_.at(const_cast<std::byte*>(data));
    const Address address{getpid(), block.descriptor, block.bytes};
    Ticket ticket{};
    std::memcpy(ticket.data(), &address, sizeof(address));
    return ticket;
  }
  std::byte* open(const Ticket& ticket) override {
    Address address;
    std::memcpy(&address, ticket.data(), sizeof(address));
    const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.descriptor);
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) throw TransportError("cannot open memory of another process's " + name());
    std::byte* data = map(descriptor, address.bytes, traits_.maps_others ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    std::lock_guard lock(mutex_);
    blocks_[data] = {descriptor, address.bytes, 0};
    return data;
  }
  void close(std::byte* data) noexcept override { free(data); }

  bool pin(std::byte*, std::size_t) override { return true; }
  // Aborts if the memory is already unmapped, because CUDA would fail, too.
  void unpin(std::byte* data) noexcept override {
    if (munlock(data, 1) == 0 || errno != ENOMEM) return;
    log::say(log::Level::kError, -1, "memory was unmapped while the simulated device had it pinned");
    std::abort();
  }

  std::shared_ptr<Event> record(Stream stream) override {
    refuse_if(failed_);
    auto event = std::make_shared<SimEvent>(failed_);
    enqueue(stream, [event] { event->reach(); });
    return event;
  }
  void synchronize() override {
    std::vector<std::shared_ptr<Event>> events{record(queue())};
    {
      std::lock_guard lock(mutex_);
      for (const Stream queue : further_) events.push_back(record(queue));
    }
    for (const auto& event : events) std::static_pointer_cast<SimEvent>(event)->wait();
  }
  void wait(Stream stream, const std::shared_ptr<Event>& event) override {
    auto simulated = std::dynamic_pointer_cast<SimEvent>(event);
    enqueue(stream, [simulated] { simulated->wait(); });
  }
  bool waits_for_words() const override { return traits_.waits_for_words; }
  void write_word(std::atomic<std::uint64_t>& word, std::uint64_t value, Stream stream) override {
    enqueue(stream, [&word, value] { word.store(value, std::memory_order_release); });
  }
  void wait_for_word(std::atomic<std::uint64_t>& word, std::uint64_t least, Stream stream) override {
    enqueue(stream, [&word, least] {
      while (static_cast<std::int64_t>(word.load(std::memory_order_acquire) - least) < 0)
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream) override {
    enqueue(stream, [=] {
      if (bytes > 0) std::memcpy(to, from, bytes);
    });
  }

 private:
  struct Block {
    int descriptor;
    std::size_t bytes;
    std::size_t occupies;  // bytes that it takes of this device; 0 if another process has allocated it
  };
  bool occupy(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    if (bytes > traits_.room - occupied_) return false;
    occupied_ += bytes;
    return true;
  }
  std::byte* occupy_block(std::size_t bytes) {
    if (!occupy(bytes)) return nullptr;
    auto* data = new std::byte[bytes];
    std::lock_guard lock(mutex_);
    taken_[data] = bytes;
    return data;
  }
  void leave_block(std::byte* data) {
    std::lock_guard lock(mutex_);
    const auto found = taken_.find(data);
    occupied_ -= found->second;
    taken_.erase(found);
  }
  void free_block(std::byte* data) {
    synchronize();  // as CUDA does
    leave_block(data);
    delete[] data;
  }
  static std::byte* map(int descriptor, std::size_t bytes, int how = MAP_SHARED) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, how, descriptor, 0);
    if (data == MAP_FAILED) {
      ::close(descriptor);
      throw TransportError("cannot map memory of a simulated device");
    }
    return static_cast<std::byte*>(data);
  }
  static void discard(std::byte* data, const Block& block) noexcept {
    munmap(data, block.bytes);
    ::close(block.descriptor);
  }

  const int ordinal_;
  const Traits traits_;
  const Failed failed_ = std::make_shared<std::atomic<bool>>(false);
  std::unique_ptr<Kernels> kernels_;
  const std::shared_ptr<Hardware> hardware_;
  mutable std::mutex mutex_;
  std::size_t occupied_ = 0;
  std::map<std::byte*, Block> blocks_;  // allocated or opened
  std::map<std::byte*, std::size_t> taken_;
  const Stream queue_;
  std::set<Stream> further_;
  BlockCache cache_{*this, [this](std::size_t bytes) { return occupy_block(bytes); },
                    [this](std::byte* data) { free_block(data); }};
};

}  // namespace

std::shared_ptr<Device> make_device(int ordinal, Traits traits) { return std::make_shared<SimDevice>(ordinal, traits); }

std::size_t occupied(const Device& device) { return dynamic_cast<const SimDevice&>(device).occupied(); }

void fail(Device& device) { dynamic_cast<SimDevice&>(device).fail(); }

void capture(Stream stream, bool on) {
  queues().with(stream, [on](Queue& queue) { queue.captured = on; });
}

void enqueue(Stream stream, std::function<void()> work) {
  if (stream == 0) {
    work();
  } else {
    queues().with(stream, [&](Queue& queue) { queue.put(std::move(work)); });
  }
}

}  // namespace sordino::sim

extern "C" void sordino_sim_enqueue(void* stream, void (*work)(void*), void* argument) {
  sordino::sim::enqueue(reinterpret_cast<sordino::Stream>(stream), [=] { work(argument); });
}
