// The receives of a rank that wait for messages, and the messages that wait for receives. A receive gets the first
// message, in the order of arrival, of its process set, tag and source. A message goes to the first receive, in the
// order of the calls, that it fits.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/message.h"

namespace sordino {

class MessageQueues {
 public:
  // Takes the receive for a message. Null if no receive fits; the caller then adds the message.
  std::shared_ptr<Posting> take_receive(int from, const Envelope& envelope);
  // Takes the message for a receive. Null if no message fits; the caller then adds the receive.
  std::shared_ptr<Arrival> take_message(const Posting& receive);
  void add(std::shared_ptr<Posting> receive);
  void add(std::shared_ptr<Arrival> message);

  // Take all receives, or messages, for which the condition holds, in order within each process set and tag.
  std::vector<std::shared_ptr<Posting>> take_receives(const std::function<bool(const Posting&)>& condition);
  std::vector<std::shared_ptr<Arrival>> take_messages(const std::function<bool(const Arrival&)>& condition);
  void visit(const std::function<void(Posting&)>& receive, const std::function<void(Arrival&)>& message);

 private:
  // An empty queue is kept, because its tag may be used again, unless there are more queues than this.
  static constexpr std::size_t kMostKept = 256;

  struct Key {
    int set;
    std::int64_t tag;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return std::hash<std::uint64_t>{}((static_cast<std::uint64_t>(key.tag) * 0x9e3779b97f4a7c15u) ^
                                        static_cast<std::uint64_t>(key.set));
    }
  };
  // No receive in it matches a message in it.
  struct Queue {
    std::deque<std::shared_ptr<Posting>> receives;
    std::deque<std::shared_ptr<Arrival>> messages;
  };
  using Queues = std::unordered_map<Key, Queue, Hash>;

  void drop_if_empty(Queues::iterator place);

  Queues queues_;
};

}  // namespace sordino
