// A simulated device that also makes every call on the CUDA kernels, with the stand-in for CUDA's runtime. So a test
// can see the launches that a GPU would get.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/sim/sim_device.h"
#include "fake_cudart.h"
#include "kernels/cuda/cuda_kernels.h"

namespace sordino::test {

// Calls a method of the CUDA kernels, notes its launches, and calls the same method of other kernels.
class CountingKernels : public Kernels {
 public:
  explicit CountingKernels(Kernels& others)
      : cuda_(kernels::cuda::make(0, {[](std::size_t bytes, Stream) { return new std::byte[bytes]; },
                                      [](std::byte* data, Stream) { delete[] data; }})),
        others_(others) {}

  // The launches since the last call.
  std::vector<std::string> taken() { return std::exchange(launched_, {}); }

  void reduce(ReduceOp op, DType type, const Rows& rows, std::size_t sources, double pre, double post,
              Stream stream) override {
    both(&Kernels::reduce, op, type, rows, sources, pre, post, stream);
  }
  void axpby(DType type, const Rows& rows, double a, double b, Stream stream) override {
    both(&Kernels::axpby, type, rows, a, b, stream);
  }
  void flatten(std::span<const kernels::Span> tensors, std::byte* flat, Stream stream) override {
    both(&Kernels::flatten, tensors, flat, stream);
  }
  void unflatten(const std::byte* flat, std::span<const kernels::Span> tensors, Stream stream) override {
    both(&Kernels::unflatten, flat, tensors, stream);
  }
  void mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
           std::span<const kernels::Average> averages, std::size_t count, Stream stream) override {
    both(&Kernels::mix, type, inputs, outputs, averages, count, stream);
  }
  void dots(DType type, const Rows& rows, double* results, Stream stream) override {
    both(&Kernels::dots, type, rows, results, stream);
  }
  void squared_distances(DType type, const Rows& rows, double* results, Stream stream) override {
    both(&Kernels::squared_distances, type, rows, results, stream);
  }
  void norms(DType type, const Rows& rows, double* results, Stream stream) override {
    both(&Kernels::norms, type, rows, results, stream);
  }
  void encode(const kernels::Codec& codec, const float* values, std::size_t count, std::byte* encoded,
              std::uint32_t* infinite, Stream stream) override {
    both(&Kernels::encode, codec, values, count, encoded, infinite, stream);
  }
  void decode(const kernels::Codec& codec, const std::byte* encoded, std::size_t count, float* values, float weight,
              bool add, float* given, Stream stream) override {
    both(&Kernels::decode, codec, encoded, count, values, weight, add, given, stream);
  }
  void unchanged(const kernels::Items& items, const std::byte* now, std::byte* before, std::byte* counts, int digits,
                 std::byte* counters, Stream stream) override {
    both(&Kernels::unchanged, items, now, before, counts, digits, counters, stream);
  }
  void draw(const kernels::Items& items, std::uint64_t key, std::byte* indices, Stream stream) override {
    both(&Kernels::draw, items, key, indices, stream);
  }
  void select(const kernels::Items& items, const std::byte* counters, std::byte* indices, Stream stream) override {
    both(&Kernels::select, items, counters, indices, stream);
  }
  void save_at(const kernels::Items& items, const std::byte* now, const std::byte* indices, std::byte* saved,
               Stream stream) override {
    both(&Kernels::save_at, items, now, indices, saved, stream);
  }
  void unchanged_at(const kernels::Items& items, const std::byte* now, const std::byte* saved, const std::byte* indices,
                    std::byte* counts, int digits, Stream stream) override {
    both(&Kernels::unchanged_at, items, now, saved, indices, counts, digits, stream);
  }
  void lars_step(DType type, const Rows& rows, const double* rates, const LarsStep& how, Stream stream) override {
    both(&Kernels::lars_step, type, rows, rates, how, stream);
  }
  void lars_rates(const double* weight_norms, const double* gradient_norms, std::span<const std::uint8_t> scaled,
                  double* rates, const LarsRates& how, Stream stream) override {
    both(&Kernels::lars_rates, weight_norms, gradient_norms, scaled, rates, how, stream);
  }

 private:
  template <class... Parameters, class... Arguments>
  void both(void (Kernels::*method)(Parameters...), const Arguments&... arguments) {
    {
      static std::mutex one_at_a_time;
      std::lock_guard lock(one_at_a_time);
      ((*cuda_).*method)(arguments...);
      for (std::string& name : std::exchange(launches(), {})) launched_.push_back(std::move(name));
    }
    (others_.*method)(arguments...);
  }

  std::unique_ptr<Kernels> cuda_;
  Kernels& others_;
  std::vector<std::string> launched_;
};

class CountingDevice : public Device {
 public:
  explicit CountingDevice(std::shared_ptr<Device> real) : real_(std::move(real)), kernels_(real_->kernels()) {}

  CountingKernels& kernels() override { return kernels_; }

  int ordinal() const override { return real_->ordinal(); }
  std::string name() const override { return real_->name(); }
  std::uint64_t identity() const override { return real_->identity(); }
  std::shared_ptr<void> use() override { return real_->use(); }
  bool capturing(Stream stream) override { return real_->capturing(stream); }
  bool takes_nccl() const override { return real_->takes_nccl(); }
  bool waits_for_words() const override { return real_->waits_for_words(); }
  void write_word(std::atomic<std::uint64_t>& word, std::uint64_t value, Stream stream) override {
    real_->write_word(word, value, stream);
  }
  void wait_for_word(std::atomic<std::uint64_t>& word, std::uint64_t least, Stream stream) override {
    real_->wait_for_word(word, least, stream);
  }
  Stream queue() const override { return real_->queue(); }
  Stream make_queue() override { return real_->make_queue(); }
  void drop_queue(Stream queue) noexcept override { real_->drop_queue(queue); }
  void free(std::byte* data) noexcept override { real_->free(data); }
  void clear(std::byte* data, std::size_t bytes) override { real_->clear(data, bytes); }
  void give_back(std::byte* data, Stream stream) noexcept override { real_->give_back(data, stream); }
  Ticket share(const std::byte* data) override { return real_->share(data); }
  std::byte* open(const Ticket& ticket) override { return real_->open(ticket); }
  void close(std::byte* data) noexcept override { real_->close(data); }
  bool pin(std::byte* data, std::size_t bytes) override { return real_->pin(data, bytes); }
  void unpin(std::byte* data) noexcept override { real_->unpin(data); }
  std::shared_ptr<Event> record(Stream stream) override { return real_->record(stream); }
  void synchronize() override { real_->synchronize(); }
  void wait(Stream stream, const std::shared_ptr<Event>& event) override { real_->wait(stream, event); }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream) override {
    real_->copy(to, from, bytes, stream);
  }

 protected:
  int hardware_queues() const override { return 8; }
  std::byte* try_allocate(std::size_t bytes) override { return real_->allocate(bytes); }
  std::byte* try_take(std::size_t bytes, Stream stream) override { return real_->take(bytes, stream); }

 private:
  std::shared_ptr<Device> real_;
  CountingKernels kernels_;
};

}  // namespace sordino::test
