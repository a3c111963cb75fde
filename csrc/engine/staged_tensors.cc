#include "engine/staged_tensors.h"

#include "arena/layout.h"

namespace sordino {

StagedTensors::StagedTensors(Running& running, const std::shared_ptr<Device>& device, Where where)
    : running_(running), device_(device) {
  const Request& first = running.first();
  const Participants& participants = *running.participants;
  const bool gives = !collective(first.opcode).only_root_gives ||
                     first.root == participants.ranks[static_cast<std::size_t>(participants.me)];
  std::size_t bytes = 0;
  // Ordered by dtype, without gaps within a dtype, so that the algorithms see one tensor per dtype.
  std::vector<std::pair<Tensor*, std::size_t>> places;
  for (int code = 0; code < kDTypeCount; ++code) {
    OfDtype run{bytes, {}, {}};
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
  buffer_ = running.staging->take(device, where, bytes, queue());
  for (auto& [tensor, offset] : places) {
    originals_.emplace_back(tensor, *tensor);
    tensor->input = buffer_->data() + offset;
    if (tensor->output) tensor->output = buffer_->data() + offset;
  }
}

void StagedTensors::copy_inputs() {
  for (const OfDtype& run : runs_) {
    std::byte* place = buffer_->data() + run.offset;
    if (copies_by_kernel(run.inputs)) {
      device_->kernels().flatten(run.inputs, place, queue());
      continue;
    }
    for (const kernels::Span& tensor : run.inputs) {
      device_->copy(place, tensor.data, tensor.bytes, queue());
      place += tensor.bytes;
    }
  }
}

void StagedTensors::copy_outputs() {
  for (const OfDtype& run : runs_) {
    std::byte* place = buffer_->data() + run.offset;
    if (copies_by_kernel(run.outputs)) {
      device_->kernels().unflatten(place, run.outputs, queue());
      continue;
    }
    for (const kernels::Span& tensor : run.outputs) {
      device_->copy(tensor.data, place, tensor.bytes, queue());
      place += tensor.bytes;
    }
  }
  for (auto& [tensor, original] : originals_) *tensor = original;
  running_.staging->give_back(buffer_, device_->record(queue()));
}

// Many tensors are copied by one kernel, which reaches pinned host memory as well. A single one is left to the copy
// engine, which runs in parallel with kernels.
bool StagedTensors::copies_by_kernel(const std::vector<kernels::Span>& tensors) const {
  return tensors.size() > 1 && (buffer_->where == Where::kDevice || buffer_->pinned);
}

}  // namespace sordino
