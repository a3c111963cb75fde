// Turns of a process set with one member: this rank agrees with itself on every operation, of whatever size, also on
// one that it has never done. So it does all operations at once, and publishes nothing.
#pragma once

#include <array>

#include "collectives/one_shot.h"

namespace sordino {

class OneShotAlone : public OneShot {
 public:
  OneShotAlone(std::vector<OneShotSlots*> slots, int rank) : OneShot(std::move(slots), {0}, 0, 1), ranks_{rank} {}

  std::shared_ptr<const Repeat> find(std::string_view name, const Signature& what) override;
  Repeat::Published publishes(Repeat&, const std::function<Recipe(std::size_t)>&) const override {
    return Repeat::Published::kInputs;
  }
  void remember(Repeat) override {}
  bool free() override { return true; }
  void enter(std::shared_ptr<const Repeat>, Entry, const std::byte*, const std::byte*) override {}
  bool over() const override { return true; }
  bool in_vain() const override { return false; }
  bool close() override { return true; }
  bool withdraw() override { return false; }
  bool deliver(const Repeat& repeat, const std::byte* input, std::byte* output) override {
    assemble(repeat.what, repeat.recipe, {&input, 1}, output);
    return true;
  }
  std::vector<Number> awaited() override { return {}; }
  std::vector<int> missing() const override { return {}; }

 private:
  std::shared_ptr<const Repeat> make(std::string_view name, const Signature& what) const;

  const std::vector<int> ranks_;
  // Recent operations, by the hashes of their names. Any of them may be dropped: making one again takes less than a
  // microsecond.
  std::array<std::shared_ptr<const Repeat>, 64> recent_;
};

}  // namespace sordino
