// Repeated all-reduces of a few floats, in the single steps of one rank's blocking call.
#pragma once

#include <string>
#include <vector>

#include "check.h"
#include "engine/world.h"
#include "engines.h"

namespace sordino::test {

using Values = std::vector<float>;

inline const Signature kSum{ReduceOp::kSum, DType::kFloat32, 1, 1, {3}};

class Call {
 public:
  Call(Engine& engine, std::string name, float value, std::size_t length = 3)
      : engine_(&engine), name_(std::move(name)), values_(length, value) {
    what_.shape = {static_cast<std::int64_t>(length)};
  }
  // Publishes the input; returns whether that worked.
  bool enter(const Signature& what) {
    const auto repeat = engine_->scheduler.find(0, "allreduce." + name_, what);
    set_ = repeat ? engine_->scheduler.enter_call(0, repeat, data(), data()) : nullptr;
    return set_ != nullptr;
  }
  bool enter() { return enter(what_); }
  bool over() const { return set_->one_shot()->over(); }
  bool in_vain() const { return set_->one_shot()->in_vain(); }
  // Returns whether the result is there, and collects it.
  bool collect() { return collected() == Scheduler::Collected::kAll; }
  Scheduler::Collected collected() { return engine_->scheduler.collect(*set_, data(), data()); }
  std::shared_ptr<Handle> submit() { return engine_->scheduler.submit(allreduce_of("allreduce." + name_, values_)); }
  bool has(float value) const { return values_ == Values(values_.size(), value); }

 private:
  std::byte* data() { return reinterpret_cast<std::byte*>(values_.data()); }

  Engine* engine_;
  std::string name_;
  Values values_;
  Signature what_ = kSum;
  std::shared_ptr<ProcessSet> set_;
};

// Does an operation again as a blocking call does: in one shot if possible.
inline bool again(World& world, const Signature& what, std::byte* data) {
  World::Found found = world.find(0, "allreduce.x", what);
  return found.repeat && world.repeat(0, std::move(found), data, data);
}

// Runs these operations on all ranks with a negotiation.
inline void agree(Engines& ranks, const std::vector<std::string>& names) {
  std::vector<Call> calls;
  calls.reserve(names.size() * static_cast<std::size_t>(ranks.size()));
  for (const std::string& name : names) {
    for (int rank = 0; rank < ranks.size(); ++rank) calls.emplace_back(ranks[rank], name, 1.0f).submit();
  }
  ranks.settle();
  for (const Call& call : calls) CHECK(call.has(static_cast<float>(ranks.size())));
}

}  // namespace sordino::test
