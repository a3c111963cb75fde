// Link between nodes by UCX: tagged messages on the worker of the process (session.h), which makes progress only while
// a thread polls the link or tests a transfer. A rank connects to another when it first needs it. It connects to its
// two neighbors on the ring of all ranks at the start, so that some rank notices each death.
#pragma once

#include <ucp/api/ucp.h>

#include <array>
#include <list>
#include <set>
#include <vector>

#include "base/config.h"
#include "transport/link.h"
#include "transport/meeting.h"
#include "transport/ucx/session.h"

namespace sordino::ucx {

// Last bytes of every control message of a world. They cannot be computed without the job's token.
using Digest = std::array<std::byte, 16>;

class UcxLink : public Link {
 public:
  UcxLink(Meeting& meeting, const Config& config, const std::string& token);
  ~UcxLink() override;

  std::string name() const override { return "ucx"; }
  void post(int to, Bytes message) override;
  bool poll(const Sink& sink) override;
  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override;
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) override;
  bool idle() const override;
  bool takes_device_memory() const override { return takes_device_memory_; }
  bool silent_work() const override { return !transfers_.empty(); }
  std::vector<Loss> take_losses() override;
  void tolerate_losses() override { tolerates_losses_ = true; }
  void abandon() override { session_.will_not_wait(); }

 private:
  friend class UcxTransfer;

  struct Peer {
    int rank = 0;
    Bytes address;
    Endpoint* endpoint = nullptr;  // null until first needed
    bool reported = false;         // take_losses() has reported its loss
    bool torn = false;             // one of its messages did not arrive complete

    bool lost() const { return endpoint != nullptr && endpoint->lost; }
  };
  // A control message in flight, and its peer.
  struct Frame : Buffer {
    Peer* peer = nullptr;
  };
  using Frames = std::list<Frame>;

  ucp_tag_t bulk_tag(int sender, Tag tag) const;
  ucp_tag_t control_tag(int sender, Use use) const;
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  Peer& reach(int rank);
  void lose(Peer& peer, ucs_status_t status) { session_.lose(*peer.endpoint, status); }
  void send_frame(Peer& to, Bytes bytes, Use use);
  void finish_sending();
  bool take();
  Frames::iterator next_whole();
  bool deliver(const Sink& sink);
  void warn_of_stranger();

  Session& session_;
  const int rank_;
  Digest digest_;
  ucp_tag_t secret_;  // the upper bits of all tags
  std::vector<Peer> peers_;
  Frames outgoing_, incoming_;              // incoming_: in the order in which they began to arrive
  std::set<class UcxTransfer*> transfers_;  // all that exist
  bool tolerates_losses_ = false, warned_ = false;
  // Flush request of UCX that idle() waits for, or null.
  mutable void* flushing_ = nullptr;
  bool takes_device_memory_;
};

}  // namespace sordino::ucx
