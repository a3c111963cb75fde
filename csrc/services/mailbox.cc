#include "services/mailbox.h"

#include <chrono>
#include <utility>

namespace sordino {

void Mailbox::send(int to, std::string text) {
  const Transport& transport = context_.transport();
  if (to < 0 || to >= transport.size()) throw UsageError("there is no rank " + std::to_string(to) + " to write to");
  if (text.size() > kLargest) {
    throw UsageError("a message of " + std::to_string(text.size()) + " bytes is too large; " +
                     std::to_string(kLargest) + " are allowed");
  }
  if (to == transport.rank()) return push({Event::Kind::kMessage, to, std::move(text), 0});
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    leaving_.emplace_back(to, std::move(text));
    sending_ = true;
  }
  context_.wake();
}

void Mailbox::push(Event event) {
  {
    std::lock_guard lock(mutex_);
    arrived_.push_back(std::move(event));
  }
  changed_.notify_all();
}

std::vector<Mailbox::Event> Mailbox::wait(double seconds) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return !arrived_.empty() || ended_; });
  std::vector<Event> events(std::make_move_iterator(arrived_.begin()), std::make_move_iterator(arrived_.end()));
  arrived_.clear();
  if (events.empty() && ended_) std::rethrow_exception(ended_);
  return events;
}

void Mailbox::receive(int from, Reader& reader) { push({Event::Kind::kMessage, from, reader.text(), 0}); }

bool Mailbox::advance(Time) {
  if (!sending_.exchange(false)) return false;
  std::deque<std::pair<int, std::string>> messages;
  {
    std::lock_guard lock(mutex_);
    messages.swap(leaving_);
  }
  for (auto& [to, text] : messages) context_.post(number_, to, Writer().put(text).take());
  return true;
}

void Mailbox::end(std::exception_ptr why) {
  {
    std::lock_guard lock(mutex_);
    ended_ = why;
    leaving_.clear();
  }
  changed_.notify_all();
}

}  // namespace sordino
