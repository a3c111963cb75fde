// Scaling by kernels before and after NCCL's reductions. NCCL itself only folds, or averages.
#pragma once

#include "collectives/nccl_channel.h"

namespace sordino::nccl {

// A reduction, split between NCCL, which only folds, and scaling before and after it.
struct Folding {
  ReduceOp op;
  double pre, post;

  Folding(DType dtype, ReduceOp op, double pre, double post, int ranks) : op(op), pre(pre), post(post) {
    if (dtype == DType::kBool) {
      this->pre = this->post = 1;  // bools ignore scales
    } else if (op == ReduceOp::kSum && is_floating(dtype) && pre == 1 && post == 1.0 / ranks) {
      this->op = ReduceOp::kAverage;
      this->post = 1;
    } else {
      divide_first(dtype, op, this->pre, this->post);
    }
  }
};

// to[t] = factor * from[t]
class Scaling {
 public:
  void add(const std::byte* from, std::byte* to, std::size_t count) {
    rows_.addresses.push_back(const_cast<std::byte*>(from));
    rows_.addresses.push_back(to);
    rows_.counts.push_back(count);
  }
  void put(Channel& channel, DType dtype, double factor) const {
    channel.device().kernels().reduce(ReduceOp::kSum, dtype, rows_, 1, factor, 1, channel.stream());
  }

 private:
  Rows rows_{2, {}, {}};
};

inline void scale(Channel& channel, DType dtype, const std::byte* from, std::byte* to, std::size_t count,
                  double factor) {
  Scaling scaling;
  scaling.add(from, to, count);
  scaling.put(channel, dtype, factor);
}

}  // namespace sordino::nccl
