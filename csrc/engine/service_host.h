// The services of a world: which are open, the messages for them, and those that are closed and have transfers under
// way.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/time.h"
#include "engine/common.h"
#include "services/service.h"
#include "services/service_context.h"

namespace sordino {

// What is not said to be for any thread is of the thread that polls, or of one that keeps others from it.
class ServiceHost : public ServiceContext {
 public:
  // `notify` wakes whoever polls. `first_tag`: how many tags have been given out in worlds before this one.
  ServiceHost(Common& common, std::function<void()> notify, std::uint64_t first_tag)
      : common_(common), notify_(std::move(notify)), tags_(first_tag) {}

  // Has a service answer messages until close(), or the end of the world.
  void open(int number, std::shared_ptr<Service> service);
  // Who closes one is lost to it on the others; `tell` them.
  void close(int number, bool tell);
  // Whether there are any. From any thread.
  bool any() const { return open_any_.load(); }

  // Moves all on; true if anything moved.
  bool advance(Time now);
  // A message for a service, or that a peer has closed one. Those for one that is not open are dropped.
  void receive(int from, Reader& reader);
  void receive_closed(int from, Reader& reader);
  void lost(int rank);
  void end(const std::exception_ptr& why);
  // What transfers may still touch stays for ever.
  void keep();
  std::uint64_t tags() const { return tags_; }

  void wake() override { notify_(); }
  Transport& transport() override { return common_.transport; }
  void post(int number, int to, const Bytes& message) override;
  Tag next_tag() override;
  void count_sent(int to, std::size_t bytes) override { common_.traffic.count(common_.transport, to, bytes); }
  bool has_left(int rank) const override { return common_.peers.gone(rank); }
  Trace& trace() override { return common_.trace; }
  Ledger& ledger() override { return common_.ledger; }

 private:
  struct Closed {
    std::shared_ptr<Service> service;
    AwakeTime since;
  };

  Common& common_;
  const std::function<void()> notify_;
  std::map<int, std::shared_ptr<Service>> open_;
  std::vector<Closed> closed_;  // whose memory transfers may still touch, or peers read
  std::atomic<bool> open_any_{false};
  std::uint64_t tags_;
};

}  // namespace sordino
