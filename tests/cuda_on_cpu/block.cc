#include "block.h"

#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "control.h"
#include "sanitizers.h"

// Saves the registers that a call keeps on the stack, stores the stack's end at `save`, and continues on another stack.
extern "C" void cuda_on_cpu_switch(void** save, void* load);
asm(R"(.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch,@function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch,.-cuda_on_cpu_switch
)");

namespace on_cpu {

constinit thread_local const Place* here = nullptr;

namespace {

constexpr std::size_t kStack = 256 << 10, kPage = 4096;
thread_local Block* running_block = nullptr;
std::atomic<unsigned long> launches, blocks, threads, barriers, exchanges;

// A random set bit, or the lowest one.
unsigned set_bit(unsigned bits, bool lowest, Random& random) {
  if (!lowest) {
    for (unsigned skipped = random.below(static_cast<std::size_t>(std::popcount(bits))); skipped > 0; --skipped) {
      bits &= bits - 1;
    }
  }
  return static_cast<unsigned>(std::countr_zero(bits));
}

bool same_line(const Line& a, const Line& b) {
  return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

}  // namespace

Counters counters() { return {launches, blocks, threads, barriers, exchanges}; }
void count_launch() { ++launches; }

Block& Block::of_this_thread() {
  thread_local auto* block = new Block;  // its thread never ends
  return *block;
}

Block& Block::running() {
  if (running_block == nullptr) fault("a function of the device is called by the host");
  return *running_block;
}

void Block::run(const std::function<void()>& body, dim3 grid, dim3 dim, unsigned index, unsigned seed) {
  running_block = this;
  body_ = &body;
  grid_ = grid, dim_ = dim, index_ = dim3(index);
  random_ = Random(seed * 0x100000001ull + index);
  in_order_ = seed == 0;
  any_warp_ = !in_order_ && random_.below(2) != 0;
  live_ = dim.x;
  at_barrier_ = ended_ = ready_ = 0;
  const unsigned warps = (dim.x + kWarp - 1) / kWarp;
  for (unsigned w = 0; w < warps; ++w) warp_at_[w] = w;
  for (unsigned w = warps; !in_order_ && w > 1; --w) std::swap(warp_at_[w - 1], warp_at_[random_.below(w)]);
  for (unsigned p = 0; p < warps; ++p) position_of_[warp_at_[p]] = p;
  for (unsigned w = 0; w < warps; ++w) {
    const unsigned lanes = std::min(kWarp, dim.x - w * kWarp);
    warps_[w].live = lanes == kWarp ? ~0u : (1u << lanes) - 1;
    warps_[w].exchange.arrived = 0;
    set_ready(w, warps_[w].live);
  }
  fibers_.fill(nullptr);
  start();
  ++blocks;
  threads += dim.x;
  running_block = nullptr;
  here = nullptr;
}

void Block::set_ready(unsigned warp, unsigned lanes) {
  warps_[warp].ready |= lanes;
  ready_ |= 1u << position_of_[warp];
}

int Block::pick() {
  if (ready_ == 0) return -1;
  const unsigned position = set_bit(ready_, !any_warp_, random_), w = warp_at_[position];
  Warp& warp = warps_[w];
  const unsigned lane = set_bit(warp.ready, in_order_, random_);
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) ready_ &= ~(1u << position);
  return static_cast<int>(w * kWarp + lane);
}

Block::Fiber& Block::fiber_for(unsigned t) {
  if (fibers_[t] != nullptr) return *fibers_[t];
  if (idle_.empty()) {
    // Many stacks in one mapping: a process may have 65,530 mappings, and a guard page splits one.
    constexpr std::size_t kTogether = 32;
    void* memory =
        mmap(nullptr, kTogether * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) fault("no memory for the stacks of fibers");
    for (std::size_t k = 0; k < kTogether; ++k) {
      auto fiber = std::make_unique<Fiber>();
      fiber->stack = static_cast<std::byte*>(memory) + k * kStack;
      // As the switch leaves it: six registers, and an address to return to, behind which the stack is as after a call.
      void** top = reinterpret_cast<void**>(fiber->stack + kStack - 72);
      top[-1] = reinterpret_cast<void*>(&Block::enter);
      fiber->stack_pointer = top - 7;
      idle_.push_back(fiber.get());
      all_fibers_.push_back(std::move(fiber));
    }
  }
  Fiber& fiber = *idle_.back();
  idle_.pop_back();
  fiber.place = {dim3(t), index_, dim_, grid_};
  return *(fibers_[t] = &fiber);
}

// Runs fibers until no thread is left.
void Block::start() {
  void* own = nullptr;
  Fiber& first = fiber_for(static_cast<unsigned>(pick()));
  from_host_ = true;
  now_ = &first;
  here = &first.place;
  start_switch(&own, first.stack + kPage, kStack - kPage);
  cuda_on_cpu_switch(&host_, first.stack_pointer);
  finish_switch(own, nullptr, nullptr);
}

// Notes the stack of the host, if this fiber comes right behind it.
void Block::arrive_on_stack(void* sanitizers_stack) {
  const void* stack = nullptr;
  std::size_t bytes = 0;
  finish_switch(sanitizers_stack, &stack, &bytes);
  if (std::exchange(from_host_, false)) host_stack_ = stack, host_stack_bytes_ = bytes;
}

void Block::change_to(Fiber& next) {
  Fiber& own = *now_;
  if (&next == &own) return;
  now_ = &next;
  here = &next.place;
  start_switch(&own.sanitizers_stack, next.stack + kPage, kStack - kPage);
  cuda_on_cpu_switch(&own.stack_pointer, next.stack_pointer);
  arrive_on_stack(own.sanitizers_stack);
}

void Block::end() {
  Fiber& own = *now_;
  start_switch(&own.sanitizers_stack, host_stack_, host_stack_bytes_);
  cuda_on_cpu_switch(&own.stack_pointer, host_);
  arrive_on_stack(own.sanitizers_stack);
}

// Lets other threads run, until this one is ready and it is its turn.
void Block::suspend() {
  const int t = pick();
  if (t < 0) fault("all threads of a block wait, some at a barrier and some in an exchange of their warp");
  change_to(fiber_for(static_cast<unsigned>(t)));
}

// The first function of a fiber. It runs one thread after the other, for as long as they need not wait for each other.
void Block::enter() {
  Block& block = *running_block;
  block.arrive_on_stack(nullptr);
  for (;;) {
    (*block.body_)();
    block.end_thread();
    const int t = block.pick();
    if (t < 0 && block.live_ != 0) fault("the last threads of a block wait for threads that have ended");
    if (t >= 0 && block.fibers_[static_cast<unsigned>(t)] == nullptr) {
      Fiber& own = *block.now_;
      own.place = {dim3(static_cast<unsigned>(t)), block.index_, block.dim_, block.grid_};
      block.fibers_[static_cast<unsigned>(t)] = &own;
    } else {
      block.idle_.push_back(block.now_);
      t < 0 ? block.end() : block.change_to(*block.fibers_[static_cast<unsigned>(t)]);
    }
  }
}

void Block::end_thread() {
  const unsigned t = thread();
  Warp& warp = warps_[t / kWarp];
  fibers_[t] = nullptr;
  warp.live &= ~(1u << t % kWarp);
  --live_;
  ++ended_;
  // Programming guide: a barrier in conditional code is allowed only if the condition is the same for the whole block.
  if (at_barrier_ != 0) fault("a thread of a block has ended, and others wait at a barrier: " + where(barrier_));
  if (warp.exchange.arrived != 0 && (warp.exchange.mask & ~warp.live) != 0) {
    fault("a lane has ended that others of its mask wait for: " + where(warp.exchange.line));
  }
}

std::string Block::where(Line line) const {
  return std::string(line.file_name()) + ":" + std::to_string(line.line()) + " (" + line.function_name() + ")";
}

void Block::barrier(Line line) {
  ++barriers;
  if (ended_ != 0) fault("a barrier, and some threads of the block have ended: " + where(line));
  if (at_barrier_ == 0) barrier_ = line;
  if (!same_line(line, barrier_)) {
    fault("threads of a block wait at different barriers: " + where(line) + " and " + where(barrier_));
  }
  if (++at_barrier_ < live_) return suspend();
  at_barrier_ = 0;
  for (unsigned w = 0; w < (dim_.x + kWarp - 1) / kWarp; ++w) set_ready(w, warps_[w].live);
  // This thread waits for its turn like the others.
  suspend();
}

// Programming guide, warp functions: all lanes of the mask must execute the same function with the same mask.
Block::Exchange& Block::arrive(unsigned mask, std::size_t bytes, Line line) {
  ++exchanges;
  const unsigned own = 1u << thread() % kWarp;
  Warp& warp = warps_[thread() / kWarp];
  Exchange& exchange = warp.exchange;
  if ((mask & own) == 0) fault("the mask of an exchange lacks the lane itself: " + where(line));
  if ((mask & ~warp.live) != 0) fault("the mask of an exchange has lanes that are not there: " + where(line));
  if (exchange.arrived == 0) {
    exchange.mask = mask, exchange.bytes = bytes, exchange.line = line, exchange.votes = 0;
  } else if (exchange.mask != mask || exchange.bytes != bytes || !same_line(exchange.line, line)) {
    fault("lanes of a warp are in different exchanges: " + where(line) + " and " + where(exchange.line));
  }
  exchange.arrived |= own;
  return exchange;
}

// Waits for the other lanes. The last one hands out the values, since lanes may go on and exchange others.
void Block::leave(Exchange& exchange) {
  if (exchange.arrived != exchange.mask) return suspend();
  for (unsigned left = exchange.mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(std::countr_zero(left));
    if (exchange.bytes == 0) {
      std::memcpy(exchange.taken[lane], &exchange.votes, sizeof exchange.votes);
    } else {
      const auto from = static_cast<unsigned>(exchange.from[lane]);
      if ((exchange.mask >> from & 1) == 0) fault("a value of a lane outside of the mask: " + where(exchange.line));
      std::memcpy(exchange.taken[lane], exchange.values[from].data(), exchange.bytes);
    }
  }
  exchange.arrived = 0;
  set_ready(thread() / kWarp, exchange.mask);
  suspend();
}

void Block::exchange(unsigned mask, const void* value, void* taken, std::size_t bytes, int from, Line line) {
  const unsigned own = thread() % kWarp;
  Exchange& exchange = arrive(mask, bytes, line);
  std::memcpy(exchange.values[own].data(), value, bytes);
  exchange.taken[own] = taken;
  exchange.from[own] = from < 0 || from >= static_cast<int>(kWarp) ? static_cast<int>(own) : from;
  leave(exchange);
}

unsigned Block::vote(unsigned mask, bool value, Line line) {
  const unsigned own = thread() % kWarp;
  unsigned result = 0;
  Exchange& exchange = arrive(mask, 0, line);
  exchange.votes |= static_cast<unsigned>(value) << own;
  exchange.taken[own] = &result;
  leave(exchange);
  return result;
}

void sync_block(Line line) { Block::running().barrier(line); }
void exchange(unsigned mask, const void* value, void* taken, std::size_t bytes, int from, Line line) {
  Block::running().exchange(mask, value, taken, bytes, from, line);
}
unsigned vote(unsigned mask, bool value, Line line) { return Block::running().vote(mask, value, line); }

}  // namespace on_cpu
