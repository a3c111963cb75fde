// Mailbox of a thread that makes decisions. It gets small messages from other ranks at any time, and other events. Each
// wakes the waiting thread. Any thread may send, push and wait.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "services/service.h"
#include "services/service_context.h"

namespace sordino {

class Mailbox : public Service {
 public:
  static constexpr std::size_t kLargest = 4096;  // bytes of a message

  struct Event {
    enum class Kind { kMessage, kLost, kDone, kNudge };
    Kind kind;
    int rank = -1;             // the sender, or the lost rank
    std::string text;          // the message
    std::uint64_t number = 0;  // kDone: number of the finished work
  };

  Mailbox(ServiceContext& context, int number) : context_(context), number_(number) {}

  // Sends a message to any rank, also to this one. Throws UsageError if it is too large, or there is no such rank.
  void send(int to, std::string text);
  // Adds an event, and wakes the waiting thread.
  void push(Event event);
  // Waits up to `seconds` for an event, and returns all events that have come, in order, or nothing when the time is
  // over. If none has come and the world or this service has ended, throws the error that ended it.
  std::vector<Event> wait(double seconds);

  void receive(int from, Reader& reader) override;
  bool advance(Time now) override;
  void lost(int rank) override { push({Event::Kind::kLost, rank, {}, 0}); }
  void end(std::exception_ptr why) override;
  bool settled() const override { return true; }

 private:
  ServiceContext& context_;
  const int number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> arrived_;
  std::deque<std::pair<int, std::string>> leaving_;
  std::atomic<bool> sending_{false};
  std::exception_ptr ended_;
};

}  // namespace sordino
