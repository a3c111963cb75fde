// Operations on device memory. There are four ways; which one is taken is the same on all ranks, as what decides it has
// been negotiated:
//
//   NCCL     where no two ranks share a device (nccl_operations.cc)
//   IPC      on one node: device memory that all its ranks map, by the algorithm for shared memory
//   MPI      between nodes, where messages take device memory: the algorithms by messages, in place
//   STAGED   through the host: the operation on the host's memory, between two copies
//
// All work of this rank is put on one queue of the device (by NCCL, on one of each communicator), behind what computes
// the inputs; whoever uses the outputs has its own queue wait for the event that the handle gets.
#include <algorithm>

#include "collectives/operations.h"
#include "collectives/process_set.h"

namespace sordino {
namespace {

constexpr std::uint64_t kIntroduction = 1;  // the one stage of it

bool located(Team& team, const std::byte* data, std::size_t bytes) {
  return team.transport.node_memory().locate(data, bytes).device != 0;
}

// Finds whether all members of a set on one node can map each other's device memory, by trying.
Task introduce(Running& running, const std::shared_ptr<Device>& device) {
  Team& team = *running.team;
  NodeMemory& memory = team.transport.node_memory();
  Desk* own = team.desks[static_cast<std::size_t>(team.me)];
  const auto block = running.staging->take(device, Where::kDevice, 1);
  own->location = memory.locate(block->data(), 1);
  team.reach(&Desk::offered, kIntroduction);
  co_await team.all_reached(&Desk::offered, kIntroduction);
  own->reaches_devices = true;
  try {
    for (std::size_t index = 0; index < team.desks.size(); ++index) {
      const Location& theirs = team.desks[index]->location;
      if (theirs.device == 0) throw TransportError("a rank cannot share its device's memory");
      if (static_cast<int>(index) != team.me) memory.map(team.ranks[index], theirs, device);
    }
  } catch (const TransportError&) {
    own->reaches_devices = false;
  }
  team.reach(&Desk::reduced, kIntroduction);
  co_await team.all_reached(&Desk::reduced, kIntroduction);
  team.shares_devices =
      std::all_of(team.desks.begin(), team.desks.end(), [](const Desk* desk) { return desk->reaches_devices; });
  team.stages_used += kIntroduction;
  running.staging->give_back(block, nullptr);
}

// Puts another place in the stead of the tensors of an operation, and copies there and back.
class Detour {
 public:
  Detour(Running& running, const std::shared_ptr<Device>& device, Where where) : running_(running), device_(device) {
    const Request& first = running.submissions.front().request;
    const bool gives = first.kind != Kind::kBroadcast || first.root == running.team->ranks[own()];
    std::size_t bytes = 0;
    // By dtype, and without gaps within one: then the algorithms see one tensor.
    std::vector<std::pair<Tensor*, std::size_t>> places;
    for (int code = 0; code < kDTypeCount; ++code) {
      Run run{bytes, {}, {}};
      for (Submission& submission : running.submissions) {
        for (Tensor& tensor : submission.request.tensors) {
          if (tensor.dtype != static_cast<DType>(code)) continue;
          places.emplace_back(&tensor, bytes);
          run.inputs.push_back({const_cast<std::byte*>(tensor.input), tensor.bytes()});
          if (tensor.output) run.outputs.push_back({tensor.output, tensor.bytes()});
          bytes += tensor.bytes();
        }
      }
      if (!gives) run.inputs.clear();
      runs_.push_back(std::move(run));
      bytes = (bytes + Layout::kAlignment - 1) / Layout::kAlignment * Layout::kAlignment;
    }
    block_ = running.staging->take(device, where, bytes);
    for (auto& [tensor, offset] : places) {
      originals_.emplace_back(tensor, *tensor);
      tensor->input = block_->data() + offset;
      if (tensor->output) tensor->output = block_->data() + offset;
    }
  }

  // Over when the inputs are there.
  Until in() {
    for (const Run& run : runs_) {
      std::byte* place = block_->data() + run.offset;
      if (at_once(run.inputs)) {
        device_->kernels().flatten(run.inputs, place, device_->queue());
        continue;
      }
      for (const kernels::Span& tensor : run.inputs) {
        device_->copy(place, tensor.data, tensor.bytes, device_->queue());
        place += tensor.bytes;
      }
    }
    return reached(device_->record(device_->queue()));
  }
  // Puts the copies of the outputs on the queue.
  void out() {
    for (const Run& run : runs_) {
      std::byte* place = block_->data() + run.offset;
      if (at_once(run.outputs)) {
        device_->kernels().unflatten(place, run.outputs, device_->queue());
        continue;
      }
      for (const kernels::Span& tensor : run.outputs) {
        device_->copy(tensor.data, place, tensor.bytes, device_->queue());
        place += tensor.bytes;
      }
    }
    for (auto& [tensor, original] : originals_) *tensor = original;
    running_.staging->give_back(block_, device_->record(device_->queue()));
  }

 private:
  // The tensors of one dtype.
  struct Run {
    std::size_t offset;
    std::vector<kernels::Span> inputs, outputs;
  };
  std::size_t own() const { return static_cast<std::size_t>(running_.team->me); }
  // Many tensors are one kernel, which reaches pinned memory of the host as well; a single one is left to the engine
  // that copies beside the kernels.
  bool at_once(const std::vector<kernels::Span>& tensors) const {
    return tensors.size() > 1 && (block_->where == Where::kDevice || block_->pinned);
  }

  Running& running_;
  const std::shared_ptr<Device>& device_;
  std::shared_ptr<Staging::Block> block_;
  std::vector<Run> runs_;
  std::vector<std::pair<Tensor*, Tensor>> originals_;
};

// Whether the operation's tensors can be averaged where they are: by dtype one piece, in memory that peers map.
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
    if (!piece || !located(*running.team, piece->input, pieces.bytes())) return false;
  }
  return true;
}

// The communicator of the operation's participants, made by the first operation of theirs.
Task connect(Running& running, const std::shared_ptr<Device>& device) {
  Team& team = *running.team;
  std::shared_ptr<nccl::Channel>& channel = (*running.channels)[{team.ranks, device->identity()}];
  if (!channel) {
    const bool first = team.me == 0;
    Bytes id(sizeof(nccl::UniqueId));
    if (first) id = nccl::Communicator::new_id();
    co_await broadcast(team, 0, id.data(), id.data(), id.size());
    nccl::Communicator::Options options;
    // On threads of the communicator's own, which end with it.
    options.use_device = [device] {
      static thread_local std::shared_ptr<void> used;
      used = device->use();
    };
    const std::shared_ptr<void> now = device->use();
    channel = std::make_shared<nccl::Channel>(
        std::make_unique<nccl::Communicator>(id, team.size(), team.me, std::move(options)), device);
  }
  running.channel = channel;
  co_await channel->ready();
}

bool nccl_folds(const Running& running) {
  const Request& first = running.submissions.front().request;
  if (first.kind != Kind::kAllreduce && first.kind != Kind::kReducescatter) return true;
  const ReduceOp op = first.op == ReduceOp::kAverage ? ReduceOp::kSum : first.op;
  for (const Submission& submission : running.submissions) {
    for (const Tensor& tensor : submission.request.tensors) {
      if (!nccl::supports(tensor.dtype, op)) return false;
    }
  }
  return true;
}

// Has a queue wait for the inputs.
void follow(const Running& running, Device& device, Stream stream) {
  for (const Submission& submission : running.submissions) {
    const Request& request = submission.request;
    if (request.ready) device.wait(stream, request.ready);
    if (request.exchange && request.exchange->after && request.exchange->after->event) {
      device.wait(stream, request.exchange->after->event);
    }
  }
}

void work_on(Running& running, const std::shared_ptr<Device>& device, Stream stream) {
  running.compute = device_compute(device, stream);
  running.team->compute = running.compute.get();
}

// Its operations are on a queue of their own from here on.
Task begin_by_nccl(Running& running, const std::shared_ptr<Device>& device) {
  running.route = "NCCL";
  co_await connect(running, device);
  follow(running, *device, running.channel->stream());
  work_on(running, device, running.channel->stream());
  running.team->channel = running.channel.get();
}

// The algorithms of the host's memory, on the device's.
Task compute_on(Running& running, const std::shared_ptr<Device>& device) {
  work_on(running, device, device->queue());
  co_await reached(device->record(device->queue()));  // peers read the tensors as soon as they are offered
  co_await run_in_place(running);
}

Task run_exchange_on_device(Running& running, const std::shared_ptr<Device>& device) {
  Request& request = running.submissions.front().request;
  const std::shared_ptr<const Exchange> what = request.exchange;
  const Stream queue = device->queue();
  co_await come_after(*running.team, *what);
  auto twin = std::make_shared<Exchange>(*what);
  twin->after = nullptr;
  if (what->passage == Passage::kNccl) {
    co_await begin_by_nccl(running, device);
    twin->shared = false;  // nothing but messages
    request.exchange = twin;
    co_await exchange_by_nccl(*running.team, *twin, *running.channel);
    co_return;
  }
  follow(running, *device, queue);
  if (what->passage == Passage::kDirect) {
    running.route = running.team->one_node ? "IPC" : "MPI";
    request.exchange = twin;
    co_await compute_on(running, device);
    co_return;
  }
  running.route = "STAGED";
  const std::size_t bytes = what->layout->bytes();
  const auto block = running.staging->take(device, Where::kHost, bytes);
  if (what->shared && running.team->transport.node_memory().locate(block->data(), bytes).segment == 0) {
    throw TransportError("no room in shared memory for " + std::to_string(bytes) + " bytes on their way from a GPU");
  }
  device->copy(block->data(), what->source, bytes, queue);
  co_await reached(device->record(queue));
  twin->source = twin->result = block->data();
  request.exchange = twin;
  co_await run_in_place(running);
  device->copy(what->result, block->data(), bytes, queue);
  running.staging->give_back(block, device->record(queue));
}

Task run_collective_on_device(Running& running, const std::shared_ptr<Device>& device) {
  Team& team = *running.team;
  const Request& first = running.submissions.front().request;
  const Abilities abilities = running.decision.abilities;
  const bool stands_for_zeros =
      team.size() < team.set_size && first.op != ReduceOp::kSum && first.op != ReduceOp::kAverage;
  const bool reduces = first.kind == Kind::kAllreduce;
  const bool by_host = reduces && (first.op == ReduceOp::kAdasum || stands_for_zeros);
  if (!by_host && team.size() > 1 && (abilities & kNccl) && nccl_folds(running)) {
    co_await begin_by_nccl(running, device);
    co_await run_in_place(running);
    co_return;
  }
  follow(running, *device, device->queue());
  if (!by_host && team.size() == 1) {
    running.route = "ALONE";
    co_await compute_on(running, device);
    co_return;
  }
  if (!by_host && reduces && team.one_node && (abilities & kMapsDevices)) {
    if (!team.shares_devices && team.size() == team.set_size) co_await introduce(running, device);
    if (team.shares_devices.value_or(false)) {
      running.route = "IPC";
      if (lies_in_place(running)) {
        co_await compute_on(running, device);
      } else {
        Detour detour(running, device, Where::kDevice);
        detour.in();
        co_await compute_on(running, device);
        detour.out();
      }
      co_return;
    }
  }
  if (!by_host && !team.one_node && (abilities & kSendsDevices)) {
    running.route = "MPI";
    co_await compute_on(running, device);
    co_return;
  }
  running.route = "STAGED";
  Detour detour(running, device, Where::kHost);
  co_await detour.in();
  co_await run_in_place(running);
  detour.out();
}

}  // namespace

Task run_on_device(Running& running) {
  const std::shared_ptr<Device> device = running.submissions.front().request.device;
  if (running.submissions.front().request.kind == Kind::kExchange) {
    co_await run_exchange_on_device(running, device);
  } else {
    co_await run_collective_on_device(running, device);
  }
  const std::shared_ptr<Event> event = device->record(running.channel ? running.channel->stream() : device->queue());
  for (Submission& submission : running.submissions) {
    submission.handle->device = device;
    submission.handle->event = event;
  }
}

}  // namespace sordino
