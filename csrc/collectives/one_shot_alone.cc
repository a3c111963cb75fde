#include "collectives/one_shot_alone.h"

#include "collectives/collective.h"

namespace sordino {

std::shared_ptr<const Repeat> OneShotAlone::find(std::string_view name, const Signature& what) {
  auto& recent = recent_[std::hash<std::string_view>{}(name) % recent_.size()];
  if (recent && recent->name == name && recent->what == what) return recent;
  auto made = make(name, what);
  if (made) recent = made;
  return made;
}

std::shared_ptr<const Repeat> OneShotAlone::make(std::string_view name, const Signature& what) const {
  const Collective& how = collective(what.opcode);
  if (!how.recipe || !is_valid(what, ranks_)) return nullptr;
  Request request;
  request.opcode = what.opcode;
  request.root = what.root;
  request.splits = what.splits;
  request.tensors.push_back({what.dtype, what.shape});
  auto made = std::make_shared<Repeat>();
  if (how.merge) {
    const Announcement mine = Announcement::of(request);
    GivenIds none;
    how.merge({{&mine}, ranks_[0], none}, made->merged);
  }
  if (how.fits && !how.fits(request, made->merged, 1, 0)) return nullptr;
  made->name = name;
  made->what = what;
  made->number = 1;
  made->published = Repeat::Published::kInputs;
  made->recipe = how.recipe(request, made->merged, ranks_, 0);
  return made;
}

}  // namespace sordino
