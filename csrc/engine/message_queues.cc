#include "engine/message_queues.h"

#include <algorithm>
#include <utility>

namespace sordino {
namespace {

bool fits(const Posting& receive, int from) { return receive.peer == Posting::kAnySource || receive.peer == from; }

template <class Member, class Condition>
std::shared_ptr<Member> take_first(std::deque<std::shared_ptr<Member>>& queue, const Condition& condition) {
  const auto found = std::find_if(queue.begin(), queue.end(), [&](const auto& one) { return condition(*one); });
  if (found == queue.end()) return nullptr;
  std::shared_ptr<Member> taken = std::move(*found);
  queue.erase(found);
  return taken;
}

template <class Member, class Condition>
void take_all(std::deque<std::shared_ptr<Member>>& queue, const Condition& condition,
              std::vector<std::shared_ptr<Member>>& taken) {
  const auto rest =
      std::stable_partition(queue.begin(), queue.end(), [&](const auto& one) { return !condition(*one); });
  taken.insert(taken.end(), std::make_move_iterator(rest), std::make_move_iterator(queue.end()));
  queue.erase(rest, queue.end());
}

}  // namespace

std::shared_ptr<Posting> MessageQueues::take_receive(int from, const Envelope& envelope) {
  const auto place = queues_.find({envelope.set, envelope.tag});
  if (place == queues_.end()) return nullptr;
  auto taken = take_first(place->second.receives, [from](const Posting& one) { return fits(one, from); });
  drop_if_empty(place);
  return taken;
}

std::shared_ptr<Arrival> MessageQueues::take_message(const Posting& receive) {
  const auto place = queues_.find({receive.set, receive.tag});
  if (place == queues_.end()) return nullptr;
  auto taken = take_first(place->second.messages, [&](const Arrival& one) { return fits(receive, one.from); });
  drop_if_empty(place);
  return taken;
}

void MessageQueues::add(std::shared_ptr<Posting> receive) {
  Queue& queue = queues_[{receive->set, receive->tag}];
  queue.receives.push_back(std::move(receive));
}

void MessageQueues::add(std::shared_ptr<Arrival> message) {
  Queue& queue = queues_[{message->envelope.set, message->envelope.tag}];
  queue.messages.push_back(std::move(message));
}

void MessageQueues::drop_if_empty(Queues::iterator place) {
  if (place->second.receives.empty() && place->second.messages.empty() && queues_.size() > kMostKept)
    queues_.erase(place);
}

std::vector<std::shared_ptr<Posting>> MessageQueues::take_receives(
    const std::function<bool(const Posting&)>& condition) {
  std::vector<std::shared_ptr<Posting>> taken;
  for (auto& [key, queue] : queues_) take_all(queue.receives, condition, taken);
  return taken;
}

std::vector<std::shared_ptr<Arrival>> MessageQueues::take_messages(
    const std::function<bool(const Arrival&)>& condition) {
  std::vector<std::shared_ptr<Arrival>> taken;
  for (auto& [key, queue] : queues_) take_all(queue.messages, condition, taken);
  return taken;
}

void MessageQueues::visit(const std::function<void(Posting&)>& receive, const std::function<void(Arrival&)>& message) {
  for (auto& [key, queue] : queues_) {
    for (const auto& one : queue.receives) receive(*one);
    for (const auto& one : queue.messages) message(*one);
  }
}

}  // namespace sordino
