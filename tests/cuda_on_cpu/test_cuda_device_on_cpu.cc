// CudaDevice (csrc/device/cuda) on the stand-in: order, memory, other processes, words, captures, and errors.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "device_fixture.h"

namespace {

using namespace sordino;

using namespace sordino::on_cpu_test;

void queues_are_ordered_by_events() {
  const Stream one = gpu->make_queue(), two = gpu->make_queue();
  std::byte* data = gpu->allocate(kMiB);
  Pinned result(kMiB);
  std::vector<std::byte> source(kMiB);
  for (int turn = 1; turn < 30; ++turn) {
    std::fill(source.begin(), source.end(), static_cast<std::byte>(turn));
    {
      Gate gate(one);
      gpu->copy(data, source.data(), kMiB, one);
      gpu->wait(two, gpu->record(one));
      std::byte* lent = gpu->take(kMiB, two);
      gpu->copy(lent, data, kMiB, two);
      gpu->copy(result.data, lent, kMiB, two);
      gpu->give_back(lent, two);
      const auto end = gpu->record(two);
      CHECK(!end->done());
      gate.open();
      while (!end->done()) std::this_thread::yield();
    }
    CHECK(std::all_of(result.data, result.data + kMiB, [&](std::byte b) { return b == std::byte(turn); }), turn);
  }
  gpu->copy(data, nullptr, 0, one);  // nothing at all
  {
    Gate gate(two);
    std::atomic<bool> begun = false, after = false;
    std::thread waiting([&] {
      begun = true;
      gpu->synchronize();
      after = gate.open_->load();
    });
    while (!begun) a_while();
    for (int turn = 0; turn < 5; ++turn) a_while();
    gate.open();
    waiting.join();
    CHECK(after, "synchronize() waits for all queues");
  }
  gpu->free(data);
  gpu->drop_queue(one);
  gpu->drop_queue(two);
  check_thread("events");
}

// The default stream, where the caller computes, does not hold up the library's queues, nor they it.
void queues_are_independent_of_the_default_stream() {
  const Stream made = gpu->make_queue();
  for (const Stream held : {Stream{0}, made}) {
    Gate gate(held);
    const Stream other = held == 0 ? made : 0;
    const auto end = gpu->record(other), later = gpu->record(gpu->queue());
    for (int turn = 0; turn < 500 && !(end->done() && later->done()); ++turn) a_while();
    CHECK(end->done() && later->done(), held == 0);
  }
  gpu->drop_queue(made);
}

// Temporary memory of a kernel comes in the order of the kernel's stream, whatever other streams wait for.
void sums_are_independent_of_other_streams() {
  const Stream made = gpu->make_queue();
  std::byte* data = gpu->allocate(4096);
  for (const Stream held : {Stream{0}, gpu->queue()}) {
    Gate gate(held);
    std::byte* lent = gpu->take(sizeof(double), made);
    gpu->kernels().norms(DType::kFloat32, Rows{1, {data}, {1024}}, reinterpret_cast<double*>(lent), made);
    gpu->give_back(lent, made);
    wait_for(made);
  }
  gpu->free(data);
  gpu->drop_queue(made);
  check_thread("sums");
}

void memory_is_zeroed_and_freed() {
  Pinned result(4096);
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4000}, 3 * kMiB}) {
    std::byte* data = gpu->allocate(bytes);
    CHECK(data != nullptr);
    const std::size_t some = std::min<std::size_t>(bytes, 4000);
    std::fill_n(result.data, some, std::byte{1});
    gpu->copy(result.data, data + bytes - some, some, gpu->queue());
    wait_for(gpu->queue());
    CHECK(std::all_of(result.data, result.data + some, [](std::byte b) { return b == std::byte{0}; }), bytes);
    gpu->free(data);
    std::byte* lent = gpu->take(bytes, gpu->queue());
    CHECK(lent != nullptr);
    gpu->give_back(lent, gpu->queue());
  }
  gpu->synchronize();
  CHECK(on_cpu::occupied() == 0, on_cpu::occupied());
  // Zeros are there when allocate() returns, whatever queue is late.
  on_cpu::set_order(5);
  for (int turn = 0; turn < 60; ++turn) {
    std::byte* data = gpu->allocate(16);
    gpu->copy(result.data, data, 16, gpu->queue());
    wait_for(gpu->queue());
    CHECK(std::all_of(result.data, result.data + 16, [](std::byte b) { return b == std::byte{0}; }), turn);
    gpu->free(data);
  }
  on_cpu::set_order(0);
  // They do not wait for other queues.
  Gate gate(gpu->queue());
  std::byte* data = gpu->allocate(5000);
  gate.open();
  gpu->free(data);
  check_thread("memory");
}

void lack_of_memory_is_told() {
  on_cpu::set_room(8 * kMiB);
  const std::string text = error_of<TransportError>([] { gpu->allocate(9 * kMiB); });
  CHECK(holds(text, "no room for 9437184 bytes on GPU on the CPU (cuda:0)"), text);
  CHECK(holds(error_of<TransportError>([] { gpu->take(9 * kMiB, gpu->queue()); }), "no room for 9437184 bytes"));
  std::byte* all = gpu->allocate(8 * kMiB);
  CHECK_THROWS(TransportError, gpu->take(1, gpu->queue()));
  gpu->free(all);
  on_cpu::set_room(std::size_t{16} << 30);
  check_thread("lack of memory");
}

void memory_is_shared_with_other_processes(const char* self) {
  std::byte* data = gpu->allocate(3 * kMiB + 77);
  std::vector<std::byte> values(3 * kMiB + 77, std::byte{11});
  gpu->copy(data, values.data(), values.size(), gpu->queue());
  wait_for(gpu->queue());
  const Ticket ticket = gpu->share(data);
  const std::string file = "/tmp/sordino-ticket-" + std::to_string(getpid());
  std::ofstream(file, std::ios::binary)
      .write(reinterpret_cast<const char*>(ticket.data()), static_cast<std::streamsize>(ticket.size()));
  CHECK(std::system((std::string(self) + " --open " + file).c_str()) == 0);
  unlink(file.c_str());
  gpu->copy(values.data(), data, values.size(), gpu->queue());
  wait_for(gpu->queue());
  CHECK(std::all_of(values.begin(), values.end(), [](std::byte b) { return b == std::byte{12}; }));
  // A process does not open its own memory, and only whole blocks of allocate() can be shared.
  CHECK_THROWS(TransportError, gpu->open(ticket));
  CHECK_THROWS(TransportError, gpu->share(data + 256));
  std::byte* lent = gpu->take(4096, gpu->queue());
  CHECK_THROWS(TransportError, gpu->share(lent));
  gpu->give_back(lent, gpu->queue());
  gpu->free(data);
  CHECK_THROWS(TransportError, gpu->share(data));
  check_thread("sharing");
}

// The other process of the test above. Returns its exit status.
int open_memory(const char* file) {
  Ticket ticket;
  std::ifstream(file, std::ios::binary)
      .read(reinterpret_cast<char*>(ticket.data()), static_cast<std::streamsize>(ticket.size()));
  std::vector<std::byte> values(3 * kMiB + 77);
  std::byte* data = gpu->open(ticket);
  gpu->copy(values.data(), data, values.size(), gpu->queue());
  wait_for(gpu->queue());
  const bool good = std::all_of(values.begin(), values.end(), [](std::byte b) { return b == std::byte{11}; });
  std::fill(values.begin(), values.end(), std::byte{12});
  gpu->copy(data, values.data(), values.size(), gpu->queue());
  gpu->close(data);  // waits
  CHECK(on_cpu::opened_blocks() == 0);
  ticket.fill(std::byte{0x7f});  // of no process
  CHECK_THROWS(TransportError, gpu->open(ticket));
  return good && test::failed == 0 ? 0 : 1;
}

void queues_wait_for_words() {
  CHECK(gpu->waits_for_words());
  const Stream one = gpu->make_queue(), two = gpu->make_queue();
  {
    Pinned page(8192);
    CHECK(!gpu->pin(page.data, 4096), "twice");
    check_thread("pinning memory twice");
    constexpr std::uint64_t kLast = ~std::uint64_t{0};
    // (the word, what a queue waits for, a value that is too small, a value that is enough)
    for (const auto& [begin, least, small, enough] :
         {std::array<std::uint64_t, 4>{0, 3, 2, 3}, {kLast - 1, 1, kLast, 1}, {0, 5, 4, 70}}) {
      page.word(9) = begin;
      gpu->wait_for_word(page.word(9), least, two);
      const auto end = gpu->record(two);
      gpu->write_word(page.word(9), small, one);
      wait_for(one);
      a_while();
      CHECK(!end->done() && page.word(9) == small, least);
      gpu->write_word(page.word(9), enough, one);
      while (!end->done()) std::this_thread::yield();
    }
    // A reader that sees the word sees the work before it.
    std::byte* data = gpu->allocate(4096);
    page.word(1) = 0;
    std::fill_n(page.data + 4096, 4096, std::byte{9});
    {
      Gate gate(one);
      gpu->copy(page.data + 4096, data, 4096, one);
      gpu->write_word(page.word(1), 1, one);
      a_while();
      CHECK(page.word(1) == 0);
    }
    while (page.word(1) != 1) std::this_thread::yield();
    CHECK(page.data[4096] == std::byte{0} && page.data[8191] == std::byte{0});
    gpu->free(data);
  }
  static std::atomic<std::uint64_t> elsewhere;
  CHECK(holds(error_of<DeviceError>([&] { gpu->write_word(elsewhere, 1, one); }), "cuStreamWriteValue64: error 1"));
  CHECK(holds(error_of<DeviceError>([&] { gpu->wait_for_word(elsewhere, 0, one); }), "cuStreamWaitValue64: error 1"));
  gpu->drop_queue(one);
  gpu->drop_queue(two);
  check_thread("words");
}

// While another thread captures a CUDA graph, the library works, and the capture stays whole.
void captures_are_left_alone() {
  const Stream captured = gpu->make_queue(), other = gpu->make_queue();
  const auto handle = reinterpret_cast<cudaStream_t>(captured);
  {
    const auto here = gpu->use();
    cudaStreamBeginCapture(handle, cudaStreamCaptureModeGlobal);
  }
  CHECK(gpu->capturing(captured) && !gpu->capturing(other) && !gpu->capturing(0));
  std::byte* data = gpu->allocate(5000);
  std::byte* lent = gpu->take(64, other);
  gpu->kernels().norms(DType::kFloat32, Rows{1, {data}, {10}}, reinterpret_cast<double*>(lent), other);
  gpu->kernels().flatten({}, data, other);
  gpu->give_back(lent, other);
  wait_for(other);
  {
    Pinned page(4096);
  }
  gpu->clear(data, 100);
  gpu->synchronize();
  gpu->free(data);
  {
    const auto here = gpu->use();
    CHECK(cudaStreamEndCapture(handle, nullptr) == cudaSuccess);
    cudaStream_t blocking = nullptr;  // as a script may make one
    cudaStreamCreateWithPriority(&blocking, 0, 0);
    cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal);
    CHECK(gpu->capturing(0), "work on the legacy stream would join the graph");
    CHECK(cudaStreamEndCapture(blocking, nullptr) == cudaSuccess);
    cudaStreamDestroy(blocking);
  }
  CHECK(!gpu->capturing(0));
  gpu->drop_queue(captured);
  gpu->drop_queue(other);
  check_thread("captures");
}

void devices_are_told_apart() {
  const cuda::Plugin& plugin = *sordino_cuda_plugin();
  CHECK(plugin.count() == 2 && plugin.obstacle().empty());
  CHECK(std::string(plugin.description) == "CUDA 13.0 on the CPU");
  CHECK(plugin.make_device(0) == gpu);
  for (const int ordinal : {-1, 2}) CHECK_THROWS(DeviceError, plugin.make_device(ordinal));
  for (const int code : {209, 222}) {
    on_cpu::set_image_error(code);
    const std::string text = error_of<NotBuilt>([&] { plugin.make_device(1); });
    CHECK(holds(text, "GPU on the CPU (cuda:1) has compute capability 9.0") && holds(text, "CUDA 13.0 on the CPU"),
          text);
  }
  on_cpu::set_image_error(cudaErrorInvalidValue);
  CHECK(holds(error_of<DeviceError>([&] { plugin.make_device(1); }), "invalid argument (cudaErrorInvalidValue)"));
  on_cpu::set_image_error(0);
  const auto other = plugin.make_device(1);
  CHECK(other->ordinal() == 1 && other->name() == "GPU on the CPU (cuda:1)" && other->takes_nccl());
  CHECK(other->identity() != gpu->identity() && other->identity() != 0);
  // A call leaves the caller's device.
  {
    const auto here = gpu->use();
    std::byte* data = other->allocate(100);
    other->free(data);
    other->drop_queue(other->make_queue());
    CHECK(on_cpu::pushed_contexts() == 1);
    cudaStream_t mine = nullptr;
    cudaStreamCreateWithPriority(&mine, cudaStreamNonBlocking, 0);
    wait_for(reinterpret_cast<Stream>(mine));  // a fault if it were the other device's
    cudaStreamDestroy(mine);
  }
  for (const auto& [code, text] : {std::pair{35, "supports CUDA up to 12.0, and Sordino was built with CUDA 13.0"},
                                   {100, "CUDA finds no GPU (no CUDA-capable device is detected): see nvidia-smi"}}) {
    on_cpu::set_driver_error(code);
    CHECK(plugin.count() == 0 && holds(plugin.obstacle(), text), plugin.obstacle());
    CHECK(holds(error_of<DeviceError>([&] { plugin.make_device(0); }), text));
  }
  on_cpu::set_driver_error(0);
  check_thread("devices");
}

void wrong_use_is_refused() {
  Kernels& kernels = gpu->kernels();
  const Stream queue = gpu->queue();
  const Rows one{1, {nullptr}, {0}}, two{2, {nullptr, nullptr}, {0}}, short_of_one{2, {nullptr}, {0}};
  CHECK_THROWS(UsageError, kernels.axpby(DType::kFloat32, one, 1, 1, queue));
  CHECK_THROWS(UsageError, kernels.axpby(DType::kFloat32, short_of_one, 1, 1, queue));
  CHECK_THROWS(UsageError, kernels.axpby(DType::kInt32, two, 1, 1, queue));
  CHECK_THROWS(UsageError, kernels.dots(DType::kBool, two, nullptr, queue));
  CHECK_THROWS(UsageError, kernels.squared_distances(DType::kFloat32, one, nullptr, queue));
  CHECK_THROWS(UsageError, kernels.norms(DType::kFloat32, two, nullptr, queue));
  CHECK_THROWS(UsageError, kernels.lars_step(DType::kFloat32, two, nullptr, {0, 0.9, false}, queue));
  CHECK_THROWS(UsageError, kernels.reduce(ReduceOp::kSum, DType::kFloat32, two, 0, 1, 1, queue));
  CHECK_THROWS(UsageError, kernels.reduce(ReduceOp::kSum, DType::kFloat32, two, 3, 1, 1, queue));
  CHECK_THROWS(UsageError, kernels.reduce(static_cast<ReduceOp>(99), DType::kFloat32, two, 1, 1, 1, queue));
  kernels.reduce(ReduceOp::kSum, DType::kFloat32, two, 2, 1, 1, queue);  // no destination: nothing to do
  std::vector<const std::byte*> inputs(3000);
  std::vector<std::byte*> outputs(3000);
  const kernels::Average average{{0}, {1}, 1.0};
  CHECK_THROWS(UsageError, kernels.mix(DType::kFloat32, inputs, outputs, {&average, 1}, 0, queue));
  Rows wide{4100, std::vector<std::byte*>(4100), {0}};
  CHECK_THROWS(UsageError, kernels.reduce(ReduceOp::kSum, DType::kFloat32, wide, 2, 1, 1, queue));
  Rows endless{2, {nullptr, nullptr}, {std::size_t{1} << 50}};
  CHECK_THROWS(UsageError, kernels.reduce(ReduceOp::kSum, DType::kFloat32, endless, 1, 1, 1, queue));
  check_thread("wrong use");
}

}  // namespace

int main(int count, char** words) {
  gpu = sordino_cuda_plugin()->make_device(0);
  if (count == 3 && std::strcmp(words[1], "--open") == 0) return open_memory(words[2]);
  check_thread("making a device");
  queues_are_ordered_by_events();
  queues_are_independent_of_the_default_stream();
  sums_are_independent_of_other_streams();
  memory_is_zeroed_and_freed();
  lack_of_memory_is_told();
  memory_is_shared_with_other_processes(words[0]);
  queues_wait_for_words();
  captures_are_left_alone();
  devices_are_told_apart();
  wrong_use_is_refused();
  gpu->synchronize();
  CHECK(on_cpu::occupied() == 0, on_cpu::occupied(), "bytes are still allocated");
  return test::report();
}
