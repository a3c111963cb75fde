// All-reduce by NCCL, on device memory. Tensors that lie apart go through the channel's scratch memory as one.
#include "collectives/nccl_operations.h"
#include "collectives/nccl_scaling.h"

namespace sordino::nccl {
namespace {

// Elements [begin, end) of some pieces: one run in memory, or several that go through scratch memory.
class Part {
 public:
  Part(Channel& channel, const Pieces& pieces, std::size_t begin, std::size_t end)
      : channel_(channel), dtype_(pieces.dtype()), count_(end - begin) {
    pieces.visit(begin, end, [this](const std::byte* input, std::byte* output, std::size_t count, std::size_t) {
      runs_.push_back({input, output, count});
    });
  }

  std::size_t count() const { return count_; }
  const std::byte* input() const { return input_; }
  std::byte* output() const { return output_; }

  void pack(double pre) {
    if (runs_.size() == 1) {
      input_ = runs_[0].input;
      output_ = runs_[0].output;
      if (pre == 1) return;
      scale(channel_, dtype_, input_, output_, count_, pre);
      input_ = output_;
      return;
    }
    input_ = output_ = channel_.scratch(count_ * size_of(dtype_));
    if (pre == 1) {
      channel_.device().kernels().flatten(spans(&Piece::input), output_, channel_.stream());
      return;
    }
    Scaling scaling;
    std::byte* place = output_;
    for (const Piece& run : runs_) {
      scaling.add(run.input, place, run.count);
      place += run.count * size_of(dtype_);
    }
    scaling.put(channel_, dtype_, pre);
  }

  void unpack(double post) {
    if (post == 1) {
      if (runs_.size() > 1) channel_.device().kernels().unflatten(output_, spans(&Piece::output), channel_.stream());
      return;
    }
    Scaling scaling;
    const std::byte* place = output_;
    for (const Piece& run : runs_) {
      scaling.add(place, run.output, run.count);
      place += run.count * size_of(dtype_);
    }
    scaling.put(channel_, dtype_, post);
  }

 private:
  template <class Pointer>
  std::vector<kernels::Span> spans(Pointer Piece::* which) const {
    std::vector<kernels::Span> all;
    for (const Piece& run : runs_) all.push_back({const_cast<std::byte*>(run.*which), run.count * size_of(dtype_)});
    return all;
  }

  Channel& channel_;
  const DType dtype_;
  const std::size_t count_;
  std::vector<Piece> runs_;
  const std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
};

}  // namespace

// All ranks make the same calls of NCCL, wherever their tensors lie: the number depends only on `most` and the number
// of elements.
Task allreduce(Channel& channel, Pieces pieces, ReduceOp op, double pre, double post, std::size_t most) {
  const Folding how(pieces.dtype(), op, pre, post, channel.communicator().size());
  const std::size_t step = most / size_of(pieces.dtype());
  for (std::size_t begin = 0; begin < pieces.count(); begin += step) {
    Part part(channel, pieces, begin, std::min(begin + step, pieces.count()));
    co_await channel.ready();
    part.pack(how.pre);
    channel.communicator().all_reduce(part.input(), part.output(), part.count(), pieces.dtype(), how.op,
                                      channel.stream());
    co_await channel.ready();
    part.unpack(how.post);
  }
}

}  // namespace sordino::nccl
