// Engines of several ranks without threads: a test decides which rank polls when, and sets the time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/control.h"
#include "engine/failure_detector.h"
#include "engine/point_to_point.h"
#include "engine/scheduler.h"
#include "engine/service_host.h"
#include "transport/sim/sim.h"

namespace sordino::test {

// The engine of one rank.
struct Engine {
  std::unique_ptr<Transport> transport;
  Common common;
  Scheduler scheduler;
  int wakes = 0;
  ServiceHost services;
  PointToPoint messages;
  Sink sink = [this](int from, std::span<const std::byte> message) { receive(from, message); };
  FailureDetector failures;
  membership::View view;

  Engine(std::unique_ptr<Transport> own, const Config& config)
      : transport(std::move(own)),
        common(*transport),
        scheduler(common, config, 0),
        services(
            common, [this] { ++wakes; }, 0),
        messages(common, services),
        failures(common, scheduler, services, messages, config, sink, nullptr, view) {}

  ~Engine() { scheduler.leave_blocks(); }

  // Returns the time `seconds` from now on this rank's clock for deadlines, which only a test advances.
  AwakeTime in(double seconds) const {
    return common.clock.now() +
           std::chrono::duration_cast<AwakeClock::duration>(std::chrono::duration<double>(seconds));
  }

  // Does the same as World::poll, without watching for failures and without catching errors.
  bool poll(Time now = std::chrono::steady_clock::now()) {
    bool moved = scheduler.announce();
    moved |= transport->poll(sink);
    moved |= scheduler.decide();
    moved |= scheduler.relay(now);
    moved |= scheduler.end_turns();
    moved |= scheduler.advance();
    moved |= services.advance(now);
    moved |= messages.advance();
    return moved;
  }

 private:
  void receive(int from, std::span<const std::byte> bytes) {
    Reader reader(bytes);
    switch (reader.one_of(kLastMessage)) {
      case Message::kBye: failures.receive_goodbye(from, reader); break;
      case Message::kMessage: messages.receive(from, reader); break;
      case Message::kService: services.receive(from, reader); break;
      case Message::kClosed: services.receive_closed(from, reader); break;
      case Message::kFailed: failures.receive_failure(from, reader); break;
      case Message::kFreed: break;
      default: scheduler.receive(from, bytes);
    }
  }
};

// Engines of ranks on the given nodes.
class Engines {
 public:
  using Wrap = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

  // `wrap`: puts another transport around each rank's transport.
  explicit Engines(
      const std::vector<int>& nodes, Config config = Config::from_environment(),
      const Wrap& wrap = [](std::unique_ptr<Transport> own) { return own; })
      : network_(nodes) {
    for (auto& transport : network_.transports())
      all_.push_back(std::make_unique<Engine>(wrap(std::move(transport)), config));
  }
  Engine& operator[](int rank) { return *all_[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(all_.size()); }
  sim::Network& network() { return network_; }

  // Polls all in turn until nothing moves.
  void settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (const auto& one : all_) {
        moved |= one->scheduler.decline(std::chrono::steady_clock::now());
        moved |= one->poll();
      }
    }
  }

 private:
  sim::Network network_;
  std::vector<std::unique_ptr<Engine>> all_;
};

// Returns an all-reduce of some floats in place.
inline Request allreduce_of(const std::string& name, std::vector<float>& values) {
  Request request;
  request.name = name;
  request.opcode = Opcode::kAllreduce;
  auto* data = reinterpret_cast<std::byte*>(values.data());
  request.tensors.push_back({DType::kFloat32, {static_cast<std::int64_t>(values.size())}, data, data});
  return request;
}

inline Request barrier_called(const std::string& name, int set = 0) {
  Request request;
  request.name = name;
  request.set = set;
  return request;
}

// Returns the text of a handle's error of type `Error`; empty if it has another error or is not done.
template <class Error>
std::string error_of(const Handle& handle) {
  if (!handle.done() || !handle.error) return {};
  try {
    std::rethrow_exception(handle.error);
  } catch (const Error& error) {
    return error.what();
  } catch (...) {
    return {};
  }
}

}  // namespace sordino::test
