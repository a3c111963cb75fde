// Operations on device memory take one of these routes. The choice depends on negotiated facts, so it is the same on
// all ranks:
//
//   ALONE    one rank
//   NCCL     no two ranks share a device (collectives/nccl_operations.h)
//   IPC      on one node: all ranks map the device memory, and run the algorithm for shared memory on it
//   MPI      between nodes, if messages can carry device memory: the algorithms by messages, in place
//   STAGED   through the host: the operation runs on host memory, between two copies
//
// All work of this rank goes on one queue of the device, behind the work that computes the inputs. A user of the
// outputs makes its own queue wait for the event in the handle. With the first three routes (IPC: if queues can meet),
// the operation is over for this thread once all its work is queued: no thread waits, and devices wait for each other.
// Otherwise the thread waits for the device. (A queue must not wait for its own host: CUDA calls such as cudaFree, or
// the loading of a kernel, may block a thread until the queue is empty, so both would wait forever.)
#include <algorithm>
#include <cstdint>
#include <span>

#include "collectives/operations.h"
#include "collectives/shared_tensors.h"
#include "engine/running.h"
#include "engine/staged_tensors.h"

namespace sordino {
namespace {

constexpr std::uint64_t kTrial = 1;  // the only stage of the trial

bool located(Participants& participants, const std::byte* data, std::size_t bytes) {
  return participants.transport.node_memory().locate(data, bytes).device != 0;
}

// The number that a rank writes into its memory for the trial.
std::uint64_t mark_of(int rank) { return 0x9e3779b97f4a7c15u * (static_cast<std::uint64_t>(rank) + 1); }

// Tests whether all members of a set on one node can map each other's device memory, and whether their queues can meet.
// Each member writes its mark and reads the marks of all, because a mapping may succeed and still show other memory
// than the peer's (in some virtual machines and containers).
Task try_sharing(Running& running, const std::shared_ptr<Device>& device) {
  Participants& participants = *running.participants;
  SharedDevices& shared = *running.devices;
  if (shared.tried || participants.size() < participants.set_size) co_return;
  NodeMemory& memory = participants.transport.node_memory();
  co_await slots_free(participants);  // peers may still read the location that the last operation has left
  SharedBlock* own = participants.blocks[static_cast<std::size_t>(participants.me)];
  const Stream queue = device->queue();
  constexpr std::size_t kBytes = sizeof(std::uint64_t);
  const std::size_t members = participants.blocks.size(), mine = members;
  const auto buffer = running.staging->take(device, Where::kDevice, kBytes, queue);
  const auto on_host = running.staging->take(device, Where::kHost, (members + 1) * kBytes, queue);
  const std::span marks(reinterpret_cast<std::uint64_t*>(on_host->data()), members + 1);
  const auto mark_at = [&](std::size_t place) { return reinterpret_cast<std::byte*>(&marks[place]); };
  co_await reached(device->record(queue));  // the queue may still copy the results of an operation from this buffer
  marks[mine] = mark_of(participants.ranks[static_cast<std::size_t>(participants.me)]);
  device->copy(buffer->data(), mark_at(mine), kBytes, queue);
  co_await reached(device->record(queue));
  own->location = memory.locate(buffer->data(), kBytes);
  participants.reach(&SharedBlock::offered, kTrial);
  co_await participants.all_reached(&SharedBlock::offered, kTrial);
  own->reaches_devices = true;
  try {
    for (std::size_t index = 0; index < members; ++index) {
      const Location& theirs = participants.blocks[index]->location;
      if (theirs.device == 0) throw TransportError("a rank cannot share its device's memory");
      const bool is_mine = static_cast<int>(index) == participants.me;
      const std::byte* data = is_mine ? buffer->data() : memory.map(participants.ranks[index], theirs, device);
      device->copy(mark_at(index), data, kBytes, queue);
    }
    co_await reached(device->record(queue));
    for (std::size_t index = 0; index < members; ++index) {
      if (marks[index] != mark_of(participants.ranks[index])) own->reaches_devices = false;
    }
  } catch (const TransportError&) {
    own->reaches_devices = false;
  }
  std::shared_ptr<QueueBarrier> barrier =
      QueueBarrier::make(device, participants.blocks, participants.ranks, participants.me);
  own->waits_for_devices = barrier != nullptr;
  participants.reach(&SharedBlock::reduced, kTrial);
  co_await participants.all_reached(&SharedBlock::reduced, kTrial);
  const auto all = [&](bool SharedBlock::* holds) {
    return std::all_of(participants.blocks.begin(), participants.blocks.end(),
                       [holds](const SharedBlock* block) { return block->*holds; });
  };
  shared.tried = true;
  shared.mapped = all(&SharedBlock::reaches_devices);
  if (shared.mapped && all(&SharedBlock::waits_for_devices)) shared.barrier = std::move(barrier);
  participants.stages_used += kTrial;
  const std::shared_ptr<Event> busy = device->record(queue);
  running.staging->give_back(buffer, busy);
  running.staging->give_back(on_host, busy);
}

// True if the tensors can be averaged where they are: for each dtype one piece, in memory that peers map.
bool lies_in_place(const Running& running) {
  for (int code = 0; code < kDTypeCount; ++code) {
    Pieces pieces(static_cast<DType>(code));
    for (const Submission& submission : running.submissions) {
      for (const Tensor& tensor : submission.request.tensors) {
        if (tensor.dtype == pieces.dtype()) pieces.add(tensor.input, tensor.output, tensor.count());
      }
    }
    if (pieces.count() == 0) continue;
    const Piece* piece = pieces.in_place();
    if (!piece || !located(*running.participants, piece->input, pieces.bytes())) return false;
  }
  return true;
}

// Gets the communicator of the operation's participants. Their first operation creates it.
Task connect(Running& running, const std::shared_ptr<Device>& device) {
  Participants& participants = *running.participants;
  NcclChannels& channels = *running.channels;
  const NcclChannels::key_type key{participants.ranks, device->identity()};
  if (const auto known = channels.find(key); known != channels.end()) {
    running.channel = known->second;
  } else {
    const bool first = participants.me == 0;
    Bytes id(sizeof(nccl::UniqueId));
    if (first) id = nccl::Communicator::new_id();
    co_await broadcast(participants, 0, id.data(), id.data(), id.size());
    nccl::Communicator::Options options;
    // Runs on the communicator's own threads, which end with it.
    options.use_device = [device] { static thread_local const std::shared_ptr<void> used = device->use(); };
    const std::shared_ptr<void> now = device->use();
    running.channel = std::make_shared<nccl::Channel>(
        std::make_unique<nccl::Communicator>(id, participants.size(), participants.me, std::move(options)), device);
    channels.emplace(key, running.channel);  // only now: a failure leaves no entry without a channel
  }
  co_await running.channel->ready();
}

bool nccl_folds(const Running& running) {
  const Request& first = running.first();
  if (!collective(first.opcode).reduces) return true;
  const ReduceOp op = first.op == ReduceOp::kAverage ? ReduceOp::kSum : first.op;
  for (const Submission& submission : running.submissions) {
    for (const Tensor& tensor : submission.request.tensors) {
      if (!nccl::supports(tensor.dtype, op)) return false;
    }
  }
  return true;
}

// Makes a queue wait for the inputs.
void follow(const Running& running, Device& device, Stream stream) {
  for (const Submission& submission : running.submissions) {
    const Request& request = submission.request;
    for (const auto& ready : request.ready) device.wait(stream, ready);
    if (request.after && request.after->event) device.wait(stream, request.after->event);
  }
}

// Wraps a queue that lives long enough without an owner: a device's, or a barrier's, on which no results are created.
OwnedQueue owned_elsewhere(Stream queue) { return std::make_shared<const Stream>(queue); }

// Sets the queue of the device on which the operation computes from here on, and makes it wait for the inputs.
void work_on(Running& running, const std::shared_ptr<Device>& device, OwnedQueue queue, Waits waits) {
  follow(running, *device, *queue);
  running.compute = device_compute(device, queue, waits);
  running.queue = std::move(queue);
  running.participants->compute = running.compute.get();
}

Task begin_by_nccl(Running& running, const std::shared_ptr<Device>& device) {
  running.route = "NCCL";
  co_await connect(running, device);
  work_on(running, device, running.channel->queue(), Waits::kForNothing);
  running.participants->channel = running.channel.get();
}

void begin_alone(Running& running, const std::shared_ptr<Device>& device) {
  running.route = "ALONE";
  work_on(running, device, owned_elsewhere(device->queue()), Waits::kForNothing);
}

void begin_with_host(Running& running, const std::shared_ptr<Device>& device, const char* route) {
  running.route = route;
  work_on(running, device, owned_elsewhere(device->queue()), Waits::kForDevice);
}

// Uses the barrier's queue if queues can meet and the operation may run ahead of the device.
void begin_by_ipc(Running& running, const std::shared_ptr<Device>& device, bool runs_ahead) {
  if (!running.devices->barrier || !runs_ahead) return begin_with_host(running, device, "IPC");
  running.route = "IPC";
  running.barrier = running.devices->barrier;
  work_on(running, device, owned_elsewhere(running.barrier->take_queue(device)), Waits::kForNothing);
  running.participants->barrier = running.barrier.get();
}

// Runs the algorithm for host memory on the device's memory. Waits for idle() first: where the thread waits for the
// device, peers read the inputs as soon as they are offered.
Task compute_on_queue(Running& running) {
  co_await running.compute->idle();
  co_await collective(running.first().opcode).run(running);
}

Task exchange_through_host(Running& running, const std::shared_ptr<Device>& device) {
  Participants& participants = *running.participants;
  const Request& request = running.first();
  const Exchange& what = *request.exchange;
  begin_with_host(running, device, "STAGED");
  participants.compute = &host_compute();  // on the copies
  const std::size_t bytes = what.layout->bytes();
  const auto buffer = running.staging->take(device, Where::kHost, bytes, *running.queue);
  if (what.shared && participants.transport.node_memory().locate(buffer->data(), bytes).segment == 0) {
    throw TransportError("no room in shared memory for " + std::to_string(bytes) + " bytes copied from a GPU");
  }
  device->copy(buffer->data(), what.source, bytes, *running.queue);
  co_await running.compute->idle();
  Exchange on_host = what;
  on_host.source = on_host.result = buffer->data();
  co_await exchange(participants, on_host, request.round);
  device->copy(what.result, buffer->data(), bytes, *running.queue);
  running.staging->give_back(buffer, device->record(*running.queue));
}

Task run_exchange_on_device(Running& running, const std::shared_ptr<Device>& device) {
  Participants& participants = *running.participants;
  const Request& request = running.first();
  const Exchange& what = *request.exchange;
  co_await come_after(running, request);
  if (what.route == Route::kNccl) {
    co_await begin_by_nccl(running, device);
    Exchange apart = what;
    apart.shared = false;  // messages only
    co_await exchange_by_nccl(participants, apart, request.round, *running.channel);
    co_return;
  }
  if (what.route == Route::kHost) {
    co_await exchange_through_host(running, device);
    co_return;
  }
  if (participants.size() == 1) {
    begin_alone(running, device);
  } else if (participants.one_node) {
    co_await try_sharing(running, device);
    begin_by_ipc(running, device, request.runs_ahead);
  } else {
    begin_with_host(running, device, "MPI");
  }
  co_await running.compute->idle();
  co_await exchange(participants, what, request.round);
}

Task run_collective_on_device(Running& running, const std::shared_ptr<Device>& device) {
  Participants& participants = *running.participants;
  const Request& first = running.first();
  const Abilities abilities = running.decision.abilities;
  const bool stands_for_zeros =
      participants.size() < participants.set_size && first.op != ReduceOp::kSum && first.op != ReduceOp::kAverage;
  const Collective& what = collective(first.opcode);
  const bool by_host = what.maps_devices && (first.op == ReduceOp::kAdasum || stands_for_zeros);
  if (!by_host && participants.size() > 1 && (abilities & kNccl) && nccl_folds(running)) {
    co_await begin_by_nccl(running, device);
    co_await collective(running.first().opcode).run(running);
    co_return;
  }
  if (!by_host && participants.size() == 1) {
    begin_alone(running, device);
    co_await compute_on_queue(running);
    co_return;
  }
  if (!by_host && what.maps_devices && participants.one_node && (abilities & kMapsDevices)) {
    co_await try_sharing(running, device);
    if (running.devices->mapped) {
      begin_by_ipc(running, device, (abilities & kRunsAhead) != 0);
      if (lies_in_place(running)) {
        co_await compute_on_queue(running);
      } else {
        StagedTensors staged(running, device, Where::kDevice);
        staged.copy_inputs();
        co_await compute_on_queue(running);
        staged.copy_outputs();
      }
      co_return;
    }
  }
  if (!by_host && !participants.one_node && (abilities & kSendsDevices)) {
    begin_with_host(running, device, "MPI");
    co_await compute_on_queue(running);
    co_return;
  }
  begin_with_host(running, device, "STAGED");
  participants.compute = &host_compute();  // on the copies
  StagedTensors staged(running, device, Where::kHost);
  staged.copy_inputs();
  co_await compute_on_queue(running);
  staged.copy_outputs();
}

}  // namespace

Task run_on_device(Running& running) {
  const std::shared_ptr<Device> device = running.first().device;
  if (running.first().exchange) {
    co_await run_exchange_on_device(running, device);
  } else {
    co_await run_collective_on_device(running, device);
  }
  const std::shared_ptr<Event> event = device->record(*running.queue);
  for (Submission& submission : running.submissions) {
    submission.handle->device = device;
    submission.handle->event = event;
    submission.handle->barrier = running.barrier;
  }
}

}  // namespace sordino
