#include "collectives/compute.h"

#include <new>
#include <string>

#include "base/error.h"

namespace sordino {
namespace {

class OnHost : public Compute {
 public:
  const std::shared_ptr<Device>& device() const override { return none_; }
  Until reduce(ReduceOp op, DType type, std::span<const std::byte* const> sources,
               std::span<std::byte* const> destinations, std::size_t count, double pre, double post) override {
    kernels::reduce(op, type, sources, destinations, count, pre, post);
    return {};
  }
  Until flatten(std::span<const kernels::Span> tensors, std::byte* flat) override {
    kernels::flatten(tensors, flat);
    return {};
  }
  Until unflatten(const std::byte* flat, std::span<const kernels::Span> tensors) override {
    kernels::unflatten(flat, tensors);
    return {};
  }
  Until mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
            std::span<const kernels::Average> averages, std::size_t count) override {
    kernels::mix(type, inputs, outputs, averages, count);
    return {};
  }
  std::shared_ptr<std::byte> scratch(std::size_t bytes) override {
    try {
      return {new std::byte[bytes], std::default_delete<std::byte[]>()};
    } catch (const std::bad_alloc&) {  // the size may come from a peer, so it may be too large
      throw TransportError("no memory for " + std::to_string(bytes) + " bytes");
    }
  }
  Until idle() override { return {}; }

 private:
  const std::shared_ptr<Device> none_;
};

class OnDevice : public Compute {
 public:
  OnDevice(std::shared_ptr<Device> device, OwnedQueue queue, Waits waits)
      : device_(std::move(device)), queue_(std::move(queue)), waits_(waits) {}

  const std::shared_ptr<Device>& device() const override { return device_; }
  Until reduce(ReduceOp op, DType type, std::span<const std::byte* const> sources,
               std::span<std::byte* const> destinations, std::size_t count, double pre, double post) override {
    Rows row{sources.size() + destinations.size(), {}, {count}};
    for (const std::byte* source : sources) row.addresses.push_back(const_cast<std::byte*>(source));
    row.addresses.insert(row.addresses.end(), destinations.begin(), destinations.end());
    device_->kernels().reduce(op, type, row, sources.size(), pre, post, *queue_);
    return over();
  }
  Until flatten(std::span<const kernels::Span> tensors, std::byte* flat) override {
    device_->kernels().flatten(tensors, flat, *queue_);
    return over();
  }
  Until unflatten(const std::byte* flat, std::span<const kernels::Span> tensors) override {
    device_->kernels().unflatten(flat, tensors, *queue_);
    return over();
  }
  Until mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
            std::span<const kernels::Average> averages, std::size_t count) override {
    device_->kernels().mix(type, inputs, outputs, averages, count, *queue_);
    return over();
  }
  std::shared_ptr<std::byte> scratch(std::size_t bytes) override {
    return {device_->take(bytes, *queue_),
            [device = device_, queue = queue_](std::byte* data) { device->give_back(data, *queue); }};
  }
  Until idle() override { return over(); }

 private:
  Until over() { return waits_ == Waits::kForDevice ? reached(device_->record(*queue_)) : Until{}; }

  const std::shared_ptr<Device> device_;
  const OwnedQueue queue_;
  const Waits waits_;
};

}  // namespace

Compute& host_compute() {
  static OnHost host;
  return host;
}

std::unique_ptr<Compute> device_compute(std::shared_ptr<Device> device, OwnedQueue queue, Waits waits) {
  return std::make_unique<OnDevice>(std::move(device), std::move(queue), waits);
}

}  // namespace sordino
