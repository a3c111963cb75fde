// The services of a world: the open ones and their messages, and closed ones whose transfers are still under way.
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

// Unless a comment says otherwise: called by the polling thread, or by a thread that keeps all others from polling.
class ServiceHost : public ServiceContext {
 public:
  // `notify` wakes the polling thread. `first_tag`: number of tags that earlier worlds have used.
  ServiceHost(Common& common, std::function<void()> notify, std::uint64_t first_tag)
      : common_(common), notify_(std::move(notify)), tags_(first_tag) {}

  // Lets a service answer messages until close() or the end of the world.
  void open(int number, std::shared_ptr<Service> service);
  // Closes a service. `tell`: announce this to the other ranks, whose services then treat this rank as lost.
  void close(int number, bool tell);
  // True if any service is open. From any thread.
  bool any() const { return open_any_.load(); }

  // Advances all services. True if anything moved.
  bool advance(Time now);
  // Handle a message for a service, or the message that a peer has closed one. Ignored if that service is not open.
  void receive(int from, Reader& reader);
  void receive_closed(int from, Reader& reader);
  void lost(int rank);
  void end(const std::exception_ptr& why);
  // Leaks all services, because transfers may still touch their memory.
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
  std::vector<Closed> closed_;  // transfers may still touch their memory, or peers read it
  std::atomic<bool> open_any_{false};
  std::uint64_t tags_;
};

}  // namespace sordino
