#include "memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

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

struct CUpool_st {
  int device;
};

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
  int shown = 0;
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

bool hidden() { return !pretends() && memory().shown == 0; }

void protect(const Block& block) {
  mprotect(block.pages, block.page_bytes, hidden() ? PROT_NONE : PROT_READ | PROT_WRITE);
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
                                           : "of the host in memory of a device";
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

// Puts memory behind the addresses of a block.
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

std::byte* allocate(std::size_t bytes, bool pool, const char* call) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (bytes > all.room - all.occupied) return nullptr;
  Block block{bytes, nullptr, 0, current_device(call)};
  block.pool = pool;
  if (!pool) {
    block.file = memfd_create("cuda-on-cpu", MFD_CLOEXEC);
    if (ftruncate(block.file, static_cast<off_t>(pages_of(bytes) + kPage)) != 0) fault("no memory for device memory");
  }
  all.occupied += bytes;
  return reserve(block);
}

enum class Where { kDevice, kRegistered, kPageable };

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

struct Ticket {
  pid_t process;
  int file;
  std::size_t bytes;
};
static_assert(sizeof(Ticket) <= sizeof(cudaIpcMemHandle_t));

}  // namespace

Shown::Shown() {
  Memory& all = memory();
  if (pretends()) return;
  std::lock_guard lock(all.mutex);
  if (all.shown++ != 0) return;
  for (const auto& [data, block] : all.blocks) {
    if (block.state == State::kLive) protect(block);
  }
}

Shown::~Shown() {
  Memory& all = memory();
  if (pretends()) return;
  std::lock_guard lock(all.mutex);
  if (--all.shown != 0) return;
  for (const auto& [data, block] : all.blocks) {
    if (block.state == State::kLive) protect(block);
  }
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

}  // namespace on_cpu

using namespace on_cpu;

extern "C" {

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  called(__func__);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;  // measured: null, and no error
  *data = allocate(bytes, false, __func__);
  if (*data == nullptr) return failed(cudaErrorMemoryAllocation);
  fill(static_cast<std::byte*>(*data), true);
  return cudaSuccess;
}

// Measured: waits while any stream of the context waits.
cudaError_t cudaFree(void* data) {
  called(__func__);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (data == nullptr) return cudaSuccess;
  drain(current_device(__func__));
  discard(static_cast<std::byte*>(data), false, false);
  return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* wanted) {
  called(__func__);
  const bool ours = wanted->allocType == cudaMemAllocationTypePinned &&
                    wanted->location.type == cudaMemLocationTypeDevice && wanted->location.id < device_count();
  if (!ours) return failed(cudaErrorInvalidValue);
  *pool = new CUpool_st{wanted->location.id};
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  called(__func__);
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) {
  called(__func__);
  return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  called(__func__);
  *data = nullptr;
  if (pool->device != current_device(__func__)) fault("a pool of another device than the current one");
  if (bytes == 0) return cudaSuccess;  // measured: null, and no error
  std::byte* found = allocate(bytes, true, __func__);
  if (found == nullptr) return failed(cudaErrorMemoryAllocation);
  put(stream, [found] { fill(found, true); }, __func__);
  *data = found;
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  called(__func__);
  put(stream, [data] { discard(static_cast<std::byte*>(data), true, false); }, __func__);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  called(__func__);
  if (where(data, bytes, __func__) == Where::kPageable && !pretends()) return failed(cudaErrorInvalidValue);
  put(
      stream,
      [=] {
        const Shown shown;
        std::memset(data, value, bytes);
      },
      __func__);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  called(__func__);
  where(to, bytes, __func__);
  // API reference, "API synchronization behavior": pageable memory is copied to a staging buffer immediately.
  if (where(from, bytes, __func__) == Where::kPageable && !pretends()) {
    const auto* first = static_cast<const std::byte*>(from);
    put(
        stream,
        [to, staged = std::make_shared<std::vector<std::byte>>(first, first + bytes)] {
          const Shown shown;
          std::memcpy(to, staged->data(), staged->size());
        },
        __func__);
  } else {
    put(
        stream,
        [=] {
          const Shown shown;
          std::memcpy(to, from, bytes);
        },
        __func__);
  }
  return cudaSuccess;
}

// API reference: for the beginning of a block of cudaMalloc.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  called(__func__);
  current_device(__func__);
  std::lock_guard lock(memory().mutex);
  const auto found = memory().blocks.find(static_cast<std::byte*>(data));
  if (found == memory().blocks.end()) return failed(cudaErrorInvalidValue);
  const Block& block = found->second;
  if (block.state != State::kLive || block.pool || block.opened) return failed(cudaErrorInvalidValue);
  const Ticket ticket{getpid(), block.file, block.bytes};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &ticket, sizeof ticket);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned flags) {
  called(__func__);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return failed(cudaErrorInvalidValue);
  Ticket ticket;
  std::memcpy(&ticket, &handle, sizeof ticket);
  // CUDA refuses a handle of the same process.
  if (ticket.process == getpid() && !pretends()) return failed(cudaErrorDeviceUninitialized);
  const std::string path = "/proc/" + std::to_string(ticket.process) + "/fd/" + std::to_string(ticket.file);
  Block block{ticket.bytes, nullptr, 0, current_device(__func__)};
  block.file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (block.file < 0) return failed(cudaErrorInvalidValue);
  block.opened = true;
  std::byte* found = nullptr;
  {
    std::lock_guard lock(memory().mutex);
    found = reserve(block);
    replace(memory().blocks.at(found), 0, getpid());
  }
  fill(found, false);
  *data = found;
  return cudaSuccess;
}

// Unmaps the memory, so it waits as cudaFree does. (Not measured.)
cudaError_t cudaIpcCloseMemHandle(void* data) {
  called(__func__);
  drain(current_device(__func__));
  discard(static_cast<std::byte*>(data), false, true);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  called(__func__);
  current_device(__func__);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  auto* at = static_cast<std::byte*>(data);
  std::lock_guard lock(memory().mutex);
  for (const auto& [begin, size] : memory().registered) {
    if (at < begin + size && begin < at + bytes) return failed(cudaErrorHostMemoryAlreadyRegistered);
  }
  memory().registered[at] = bytes;
  return cudaSuccess;
}

// Measured: waits while any stream of the context waits.
cudaError_t cudaHostUnregister(void* data) {
  called(__func__);
  drain(current_device(__func__));
  std::lock_guard lock(memory().mutex);
  const bool found = memory().registered.erase(static_cast<std::byte*>(data)) != 0;
  return found ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

}  // extern "C"
