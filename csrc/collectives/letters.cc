#include "collectives/letters.h"

#include <chrono>
#include <utility>

#include "collectives/world.h"

namespace sordino {

void Letters::send(int to, std::string text) {
  if (to < 0 || to >= world_.size()) throw UsageError("there is no rank " + std::to_string(to) + " to write to");
  if (text.size() > kLargest) {
    throw UsageError("a letter of " + std::to_string(text.size()) + " bytes is too large; " + std::to_string(kLargest) +
                     " are allowed");
  }
  if (to == world_.rank()) return push({Event::Kind::kLetter, to, std::move(text), 0});
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    outbox_.emplace_back(to, std::move(text));
    sending_ = true;
  }
  world_.wake();
}

void Letters::push(Event event) {
  {
    std::lock_guard lock(mutex_);
    inbox_.push_back(std::move(event));
  }
  changed_.notify_all();
}

std::vector<Letters::Event> Letters::wait(double seconds) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return !inbox_.empty() || ended_; });
  std::vector<Event> events(std::make_move_iterator(inbox_.begin()), std::make_move_iterator(inbox_.end()));
  inbox_.clear();
  if (events.empty() && ended_) std::rethrow_exception(ended_);
  return events;
}

void Letters::receive(int from, Reader& reader) { push({Event::Kind::kLetter, from, reader.text(), 0}); }

bool Letters::advance(Time) {
  if (!sending_.exchange(false)) return false;
  std::deque<std::pair<int, std::string>> letters;
  {
    std::lock_guard lock(mutex_);
    letters.swap(outbox_);
  }
  for (auto& [to, text] : letters) world_.post_to_service(number_, to, Writer().put(text).take());
  return true;
}

void Letters::end(std::exception_ptr why) {
  {
    std::lock_guard lock(mutex_);
    ended_ = why;
    outbox_.clear();
  }
  changed_.notify_all();
}

}  // namespace sordino
