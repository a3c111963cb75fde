// The link between nodes by UCX: tagged messages on the worker of the process (session.h), which moves only while
// somebody polls the link or tests a transfer. A rank is connected to when it is first needed, and to its neighbours on
// the ring of all ranks at once, so that every death is seen by somebody.
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

// What every control message of a world begins with: who does not know the job's token does not know this.
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
  void outlive_peers() override { outlives_ = true; }
  void abandon() override { session_.will_not_wait(); }
  bool ends_together() const override { return true; }  // by Session::take_leave

 private:
  friend class UcxTransfer;

  struct Peer {
    int rank = 0;
    Bytes address;
    Endpoint* endpoint = nullptr;  // from when it is first needed
    bool told = false;             // take_losses() has told of its loss
    bool torn = false;             // one of its messages did not come whole

    bool lost() const { return endpoint != nullptr && endpoint->lost; }
  };
  // A control message on its way, and whose it is.
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
  ucp_tag_t secret_;  // upper bits of all tags
  std::vector<Peer> peers_;
  Frames outgoing_, incoming_;              // the latter in the order in which they began to come
  std::set<class UcxTransfer*> transfers_;  // those that exist
  bool outlives_ = false, warned_ = false;
  // Somebody waits until all that was posted has left, and what UCX has returned for that.
  mutable void* flushing_ = nullptr;
  bool takes_device_memory_;
};

}  // namespace sordino::ucx
