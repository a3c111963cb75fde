#include "collectives/nccl_operations.h"

#include <bit>
#include <numeric>
#include <thread>

namespace sordino::nccl {
namespace {

constexpr std::chrono::seconds kPatience{10};  // with what is on the queue at the end

// How a reduction is split between NCCL, which only folds, and scaling before and after it.
struct Folding {
  ReduceOp op;
  double pre, post;

  Folding(DType dtype, ReduceOp op, double pre, double post, int ranks) : op(op), pre(pre), post(post) {
    if (dtype == DType::kBool) {
      this->pre = this->post = 1;  // which bools ignore
    } else if (op == ReduceOp::kSum && is_floating(dtype) && pre == 1 && post == 1.0 / ranks) {
      this->op = ReduceOp::kAverage;
      this->post = 1;
    } else if (op == ReduceOp::kSum && dtype == DType::kFloat16 && post < 1) {
      this->pre *= std::exchange(this->post, 1.0);  // sums stay in float16's range, as in allreduce_messages.cc
    }
  }
};

// to[t] = factor * from[t]
class Scaling {
 public:
  void add(const std::byte* from, std::byte* to, std::size_t count) {
    rows_.addresses.insert(rows_.addresses.end(), {const_cast<std::byte*>(from), to});
    rows_.counts.push_back(count);
  }
  void put(Channel& channel, DType dtype, double factor) const {
    channel.device().kernels().reduce(ReduceOp::kSum, dtype, rows_, 1, factor, 1, channel.stream());
  }

 private:
  Rows rows_{2, {}, {}};
};

void scale(Channel& channel, DType dtype, const std::byte* from, std::byte* to, std::size_t count, double factor) {
  Scaling scaling;
  scaling.add(from, to, count);
  scaling.put(channel, dtype, factor);
}

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

  void gather(double pre) {
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

  void scatter(double post) {
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

bool all_equal(const std::vector<std::size_t>& sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [&](std::size_t size) { return size == sizes[0]; });
}

}  // namespace

Channel::~Channel() {
  if (!communicator_->close()) return;
  try {
    const auto over = device_->record(stream_);
    const auto limit = std::chrono::steady_clock::now() + kPatience;
    while (!over->done()) {
      if (std::chrono::steady_clock::now() > limit) return;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (scratch_) device_->give_back(scratch_, stream_);
    device_->drop_queue(stream_);
  } catch (const Error&) {
    // The device has failed, and takes its memory along.
  }
}

std::byte* Channel::scratch(std::size_t bytes) {
  if (bytes <= capacity_) return scratch_;
  if (scratch_) device_->give_back(scratch_, stream_);
  scratch_ = nullptr;
  capacity_ = 0;
  const std::size_t capacity = std::bit_ceil(bytes);
  scratch_ = device_->take(capacity, stream_);
  capacity_ = capacity;
  return scratch_;
}

// Whether or not its tensors lie side by side, a rank makes the calls that the others make: `most` alone decides.
Task allreduce(Channel& channel, Pieces pieces, ReduceOp op, double pre, double post, std::size_t most) {
  const Folding how(pieces.dtype(), op, pre, post, channel.communicator().size());
  const std::size_t step = most / size_of(pieces.dtype());
  for (std::size_t begin = 0; begin < pieces.count(); begin += step) {
    Part part(channel, pieces, begin, std::min(begin + step, pieces.count()));
    co_await channel.ready();
    part.gather(how.pre);
    channel.communicator().all_reduce(part.input(), part.output(), part.count(), pieces.dtype(), how.op,
                                      channel.stream());
    co_await channel.ready();
    part.scatter(how.post);
  }
}

Task broadcast(Channel& channel, int root, const std::byte* input, std::byte* output, std::size_t bytes) {
  co_await channel.ready();
  channel.communicator().broadcast(input, output, bytes, root, channel.stream());
  co_await channel.ready();
}

Task allgather(Channel& channel, const std::byte* input, std::vector<std::size_t> sizes, std::byte* output) {
  Communicator& communicator = channel.communicator();
  co_await channel.ready();
  if (all_equal(sizes)) {
    communicator.all_gather(input, output, sizes[0], channel.stream());
  } else {
    Group group(communicator);
    for (int root = 0; root < communicator.size(); ++root) {
      const std::size_t bytes = sizes[static_cast<std::size_t>(root)];
      communicator.broadcast(root == communicator.rank() ? input : output, output, bytes, root, channel.stream());
      output += bytes;
    }
    group.end();
  }
  co_await channel.ready();
}

Task alltoall(Channel& channel, const std::byte* input, std::vector<std::size_t> send_sizes, std::byte* output,
              std::vector<std::size_t> receive_sizes) {
  Communicator& communicator = channel.communicator();
  co_await channel.ready();
  {
    Group group(communicator);
    for (int peer = 0; peer < communicator.size(); ++peer) {
      const std::size_t out = send_sizes[static_cast<std::size_t>(peer)];
      const std::size_t in = receive_sizes[static_cast<std::size_t>(peer)];
      if (peer == communicator.rank()) {
        if (in > 0) channel.device().copy(output, input, in, channel.stream());
      } else {
        communicator.send(input, out, peer, channel.stream());
        communicator.receive(output, in, peer, channel.stream());
      }
      input += out;
      output += in;
    }
    group.end();
  }
  co_await channel.ready();
}

Task reducescatter(Channel& channel, DType dtype, const std::byte* input, std::vector<std::size_t> bounds,
                   std::byte* output, ReduceOp op, double pre, double post) {
  Communicator& communicator = channel.communicator();
  const Folding how(dtype, op, pre, post, communicator.size());
  const std::size_t width = size_of(dtype);
  std::vector<std::size_t> counts(bounds.size());
  std::adjacent_difference(bounds.begin(), bounds.end(), counts.begin());
  counts.erase(counts.begin());
  if (bounds.back() == 0) co_return;
  co_await channel.ready();
  if (how.pre != 1) {
    std::byte* scaled = channel.scratch(bounds.back() * width);
    scale(channel, dtype, input, scaled, bounds.back(), how.pre);
    input = scaled;
  }
  if (all_equal(counts)) {
    communicator.reduce_scatter(input, output, counts[0], dtype, how.op, channel.stream());
  } else {
    Group group(communicator);
    for (int root = 0; root < communicator.size(); ++root) {
      const auto part = static_cast<std::size_t>(root);
      communicator.reduce(input + bounds[part] * width, root == communicator.rank() ? output : nullptr, counts[part],
                          dtype, how.op, root, channel.stream());
    }
    group.end();
  }
  co_await channel.ready();
  const std::size_t mine = counts[static_cast<std::size_t>(communicator.rank())];
  if (how.post != 1 && mine > 0) scale(channel, dtype, output, output, mine, how.post);
}

}  // namespace sordino::nccl
