#include "memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "control.h"
#include "queues.h"
#include "sanitizers.h"

namespace on_cpu {
namespace {

constexpr std::size_t kPage = 4096, kAlignment = 256;  // cudaMalloc's, programming guide "device memory accesses"
constexpr std::size_t kAddresses = std::size_t{4} << 40;
constexpr int kFresh = 0xcb, kBehind = 0x5a;

enum class State { kPending, kLive, kFreed };

struct Block {
  std::size_t bytes;
  std::byte* pages;
  std::size_t page_bytes;
  int device;
  int file = -1;  // of cudaMalloc and of opened memory
  bool pool = false, opened = false;
  State state = State::kPending;
};

// The last page of a file: the processes that have the memory open.
struct Openers {
  std::atomic<pid_t> processes[kPage / sizeof(pid_t)];
};

struct Memory {
  std::mutex mutex;
  std::byte* begin = nullptr;
  std::byte* next = nullptr;
  std::map<std::byte*, Block> blocks;  // freed ones, too: for messages
  std::map<std::byte*, std::size_t> registered;
  std::size_t room = std::size_t{16} << 30, occupied = 0;
  std::map<int, int> shown;  // by device
};

void explain(int number, siginfo_t* info, void*);

Memory& memory() {
  static auto* all = [] {
    auto* made = new Memory;
    void* found = mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) fault("no addresses for device memory");
    made->begin = made->next = static_cast<std::byte*>(found);
    struct sigaction action{};
    action.sa_sigaction = &explain;
    action.sa_flags = SA_SIGINFO | SA_RESETHAND;
    for (const int number : {SIGSEGV, SIGBUS}) sigaction(number, &action, nullptr);
    return made;
  }();
  return *all;
}

// Makes a block accessible, or not. Call it with the mutex.
void protect(const Block& block) {
  auto& shown = memory().shown;
  const bool accessible = pretends() || shown[Shown::kAll] != 0 || shown[block.device] != 0;
  mprotect(block.pages, block.page_bytes, accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
}

// Changes the number of pieces of work that see a device's memory.
void show(int device, int more) {
  if (pretends()) return;
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  int& count = all.shown[device];
  const bool before = count != 0;
  count += more;
  if (before == (count != 0)) return;
  for (const auto& [data, block] : all.blocks) {
    const bool ours = device == Shown::kAll || block.device == device;
    if (ours && block.state == State::kLive) protect(block);
  }
}

// The block that an address belongs to, or that ends before it. Call it with the mutex.
std::pair<std::byte* const, Block>* block_before(const std::byte* at) {
  auto found = memory().blocks.upper_bound(const_cast<std::byte*>(at));
  return found == memory().blocks.begin() ? nullptr : &*--found;
}

void explain(int number, siginfo_t* info, void*) {
  const auto* at = static_cast<const std::byte*>(info->si_addr);
  Memory& all = memory();
  if (at < all.begin || at >= all.begin + kAddresses) {
    std::fprintf(stderr, "CUDA on the CPU: signal %d at address %p, which is no device memory\n", number,
                 info->si_addr);
    return;  // the access is repeated, and this time ends the process
  }
  const auto* found = block_before(at);
  const char* why = "before the first block of device memory";
  std::ptrdiff_t distance = 0;
  if (found != nullptr) {
    const Block& block = found->second;
    distance = at - found->first;
    why = static_cast<std::size_t>(distance) >= block.bytes ? "outside of any block of device memory"
          : block.state == State::kPending ? "in memory of a pool before its allocation in the order of the stream"
          : block.state == State::kFreed   ? "in memory that was freed before"
                                           : "of the host, or of another device, in memory of a device";
  }
  std::fprintf(stderr, "CUDA on the CPU: an access %s: byte %td of a block of %zu\n", why, distance,
               found != nullptr ? found->second.bytes : 0);
  std::abort();
}

std::size_t pages_of(std::size_t bytes) {
  const std::size_t aligned = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return (aligned + kPage - 1) / kPage * kPage;
}

// Reserves addresses for a block whose end lies near the end of its pages. Call it with the mutex.
std::byte* reserve(Block block) {
  Memory& all = memory();
  block.page_bytes = pages_of(block.bytes);
  block.pages = all.next + kPage;
  all.next = block.pages + block.page_bytes;
  if (all.next + kPage > all.begin + kAddresses) fault("all addresses for device memory are used up");
  std::byte* data = all.next - (block.bytes + kAlignment - 1) / kAlignment * kAlignment;
  all.blocks[data] = block;
  return data;
}

Openers* openers_of(const Block& block) {
  void* found =
      mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, block.file, static_cast<off_t>(block.page_bytes));
  if (found == MAP_FAILED) fault("no memory for the list of processes that have a block open");
  return static_cast<Openers*>(found);
}

// Replaces a pid in the list of openers by another.
bool replace(const Block& block, pid_t from, pid_t to) {
  Openers* openers = openers_of(block);
  bool done = false;
  for (auto& process : openers->processes) {
    pid_t expected = from;
    if ((done = process.compare_exchange_strong(expected, to))) break;
  }
  munmap(openers, kPage);
  return done;
}

bool is_open_elsewhere(const Block& block) {
  Openers* openers = openers_of(block);
  bool open = false;
  for (auto& process : openers->processes) open |= process != 0 && kill(process, 0) == 0;
  munmap(openers, kPage);
  return open;
}

}  // namespace

Shown::Shown(int device) : device_(device) { show(device_, 1); }
Shown::~Shown() { show(device_, -1); }

void fill(std::byte* data, bool fresh) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  Block& block = all.blocks.at(data);
  const int flags = MAP_FIXED | (block.file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  if (mmap(block.pages, block.page_bytes, PROT_READ | PROT_WRITE, flags, block.file, 0) == MAP_FAILED) {
    fault("no memory for a block of device memory");
  }
  const std::size_t behind = static_cast<std::size_t>(block.pages + block.page_bytes - data) - block.bytes;
  if (fresh) {
    std::memset(data, kFresh, block.bytes);
    std::memset(data + block.bytes, kBehind, behind);
  }
  forbid(data + block.bytes, behind);
  block.state = State::kLive;
  protect(block);
}

void discard(std::byte* data, bool pool, bool opened) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  const auto found = all.blocks.find(data);
  if (found == all.blocks.end() || found->second.state == State::kFreed) fault("memory is freed that is not allocated");
  Block& block = found->second;
  if (block.pool != pool) fault("memory of a pool is freed by cudaFree, or other memory by cudaFreeAsync");
  if (block.opened != opened) fault("memory that was opened is freed, or other memory is closed");
  if (!opened && !pool && is_open_elsewhere(block)) fault("memory is freed that another process has open");
  mprotect(block.pages, block.page_bytes, PROT_READ | PROT_WRITE);
  const std::size_t behind = static_cast<std::size_t>(block.pages + block.page_bytes - data) - block.bytes;
  allow(data + block.bytes, behind);
  for (std::size_t k = 0; k < behind; ++k) {
    if (data[block.bytes + k] != std::byte{kBehind}) fault("a byte behind a block of device memory was written");
  }
  mmap(block.pages, block.page_bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (opened) replace(block, getpid(), 0);
  if (block.file >= 0) close(block.file);
  if (!opened) all.occupied -= block.bytes;
  block.state = State::kFreed;
}

std::byte* allocate(std::size_t bytes, bool pool, int device) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (bytes > all.room - all.occupied) return nullptr;
  Block block{bytes, nullptr, 0, device};
  block.pool = pool;
  if (!pool) {
    block.file = memfd_create("cuda-on-cpu", MFD_CLOEXEC);
    if (ftruncate(block.file, static_cast<off_t>(pages_of(bytes) + kPage)) != 0) fault("no memory for device memory");
  }
  all.occupied += bytes;
  return reserve(block);
}

Where where(const void* data, std::size_t bytes, const char* call) {
  const auto* at = static_cast<const std::byte*>(data);
  Memory& all = memory();
  {
    std::lock_guard lock(all.mutex);
    if (at >= all.begin && at < all.begin + kAddresses) {
      const auto* found = block_before(at);
      const bool inside = found != nullptr && found->second.state != State::kFreed &&
                          static_cast<std::size_t>(at - found->first) + bytes <= found->second.bytes;
      if (!inside) fault(std::string(call) + " of bytes that are not all in one block of device memory");
      return Where::kDevice;
    }
  }
  return is_registered(data, bytes) ? Where::kRegistered : Where::kPageable;
}

bool is_registered(const void* data, std::size_t bytes) {
  std::lock_guard lock(memory().mutex);
  auto found = memory().registered.upper_bound(static_cast<std::byte*>(const_cast<void*>(data)));
  if (found == memory().registered.begin()) return false;
  --found;
  return static_cast<const std::byte*>(data) + bytes <= found->first + found->second;
}

void set_room(std::size_t bytes) { memory().room = bytes; }
std::size_t occupied() {
  std::lock_guard lock(memory().mutex);
  return memory().occupied;
}
std::size_t opened_blocks() {
  std::lock_guard lock(memory().mutex);
  return static_cast<std::size_t>(std::count_if(memory().blocks.begin(), memory().blocks.end(), [](const auto& entry) {
    return entry.second.opened && entry.second.state != State::kFreed;
  }));
}

bool share(const std::byte* data, Ticket& ticket) {
  std::lock_guard lock(memory().mutex);
  const auto found = memory().blocks.find(const_cast<std::byte*>(data));
  if (found == memory().blocks.end()) return false;
  const Block& block = found->second;
  if (block.state != State::kLive || block.pool || block.opened) return false;
  ticket = {getpid(), block.file, block.bytes};
  return true;
}

std::byte* open_shared(const Ticket& ticket, int device) {
  const std::string path = "/proc/" + std::to_string(ticket.process) + "/fd/" + std::to_string(ticket.file);
  Block block{ticket.bytes, nullptr, 0, device};
  block.file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (block.file < 0) return nullptr;
  block.opened = true;
  std::byte* found = nullptr;
  {
    std::lock_guard lock(memory().mutex);
    found = reserve(block);
    replace(memory().blocks.at(found), 0, getpid());
  }
  fill(found, false);
  return found;
}

bool register_host(std::byte* data, std::size_t bytes) {
  std::lock_guard lock(memory().mutex);
  for (const auto& [begin, size] : memory().registered) {
    if (data < begin + size && begin < data + bytes) return false;
  }
  memory().registered[data] = bytes;
  return true;
}

bool unregister_host(std::byte* data) {
  std::lock_guard lock(memory().mutex);
  return memory().registered.erase(data) != 0;
}

}  // namespace on_cpu
