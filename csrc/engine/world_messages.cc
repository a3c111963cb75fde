// World's functions for messages between two ranks.
#include <sched.h>

#include <algorithm>

#include "base/relax.h"
#include "engine/world.h"

namespace sordino {

void World::check(Posting& call) const {
  require_own_process();
  const bool any = call.peer == Posting::kAnySource && !call.sends;
  if (call.tag < 0) throw UsageError(call.text() + ": a tag must not be negative");
  if (call.set == 0 && !any) {
    if (call.peer >= 0 && call.peer < size()) return;
    throw UsageError(call.text() + ": there are ranks 0 to " + std::to_string(size() - 1));
  }
  const std::vector<int> members = scheduler_->members(call.set);
  const auto require_member = [&](int rank) {
    if (std::find(members.begin(), members.end(), rank) != members.end()) return;
    throw UsageError(call.text() + ": rank " + std::to_string(rank) + " is not a member of process set " +
                     std::to_string(call.set));
  };
  require_member(rank());
  if (!any) return require_member(call.peer);
  for (const int member : members) {
    if (member != rank() || members.size() == 1) call.sources.push_back(member);
  }
}

// Calls a function that moves messages. The thread must have the turn to poll. An exception ends the world.
void World::move_messages(const std::function<void()>& move) {
  if (retired_) return;
  try {
    move();
  } catch (...) {
    failures_->caught(std::current_exception());
  }
}

std::shared_ptr<Handle> World::start_message(std::shared_ptr<Posting> call) {
  check(*call);
  auto handle = messages_->submit(std::move(call));
  const auto begin = [this] { move_messages([this] { messages_->begin_submitted(); }); };
  const bool begun = progress_->try_alone(begin);
  if (!begun || (!handle->done() && !progress_->expects_wait())) progress_->notify();
  return handle;
}

// Until the message is done, this thread reads the fast boxes (fast_box.h) itself, which takes less time than a poll.
std::shared_ptr<Handle> World::run_message(std::shared_ptr<Posting> call) {
  check(*call);
  auto handle = messages_->submit(std::move(call));
  auto turn = progress_->try_turn();
  if (!turn) {
    wait(*handle);
    return handle;
  }
  const auto over = [&] {
    if (!handle->done()) move_messages([this] { messages_->read_boxes(); });
    return handle->done();
  };
  move_messages([this] { messages_->begin_submitted(); });
  if (handle->done()) return handle;
  const Time begin = std::chrono::steady_clock::now();
  const int looks = std::max(patience_, kLooks);
  for (int look = 0; look < looks && !over(); ++look) {
    if (patience_ > 0) {
      relax();
    } else {
      sched_yield();  // to the ranks that share this core
    }
  }
  try {
    progress_->poll_until(turn, over, kLooks, interrupt_);
  } catch (...) {
    std::string name;
    progress_->alone([&] { name = messages_->text_of(*handle); });
    interrupted(name);
    throw;
  }
  count_wait(begin);
  return handle;
}

}  // namespace sordino
