#include "engine/service_host.h"

#include "base/keep.h"
#include "engine/control.h"

namespace sordino {
namespace {

// After this time, node peers that copy from a closed service's memory have learned that it is closed.
constexpr std::chrono::milliseconds kReadUntil{1000};

}  // namespace

void ServiceHost::open(int number, std::shared_ptr<Service> service) {
  open_[number] = service;
  open_any_ = true;
  if (common_.failure.latched()) service->end(common_.failure.failure());
}

void ServiceHost::close(int number, bool tell) {
  const auto found = open_.find(number);
  if (found == open_.end()) return;
  found->second->end(std::make_exception_ptr(UsageError("the service has been closed")));
  if (tell) common_.peers.post_to_all(Writer().put(Message::kClosed).put(number).take());
  closed_.push_back({std::move(found->second), common_.clock.now()});
  open_.erase(found);
  open_any_ = !open_.empty();
}

bool ServiceHost::advance(Time now) {
  bool moved = false;
  for (auto& [number, service] : open_) moved |= service->advance(now);
  std::erase_if(closed_, [this, now](Closed& closed) {
    closed.service->advance(now);
    return closed.service->settled() && common_.clock.now() - closed.since > kReadUntil;
  });
  return moved;
}

void ServiceHost::receive(int from, Reader& reader) {
  const auto found = open_.find(reader.get<int>());
  if (found != open_.end()) found->second->receive(from, reader);
}

void ServiceHost::receive_closed(int from, Reader& reader) {
  const auto found = open_.find(reader.get<int>());
  if (found != open_.end()) found->second->lost(from);
}

void ServiceHost::lost(int rank) {
  for (auto& [number, service] : open_) service->lost(rank);
}

void ServiceHost::end(const std::exception_ptr& why) {
  for (auto& [number, service] : open_) service->end(why);
}

void ServiceHost::keep() {
  leak_intentionally(std::move(open_));
  leak_intentionally(std::move(closed_));
}

void ServiceHost::post(int number, int to, const Bytes& message) {
  if (has_left(to)) return;
  Bytes whole = Writer().put(Message::kService).put(number).take();
  whole.insert(whole.end(), message.begin(), message.end());
  common_.transport.post(to, std::move(whole));
}

Tag ServiceHost::next_tag() {
  return static_cast<Tag>(kTagSets) << kTagSequenceBits | static_cast<Tag>(tags_++ & ((1 << kTagSequenceBits) - 1));
}

}  // namespace sordino
