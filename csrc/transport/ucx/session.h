// UCX's life in this process: one context, one worker, and an endpoint for each process that it talks to. They stay
// until the process ends, whatever worlds come and go, for a connection that one side closes takes along what the other
// has not read yet. Before they end, processes take leave of each other, as in MPI_Finalize.
//
// The worker moves only while somebody polls: UCX has no thread here. Worlds are polled by threads of their own, so
// whoever calls UCX holds the lock.
#pragma once

#include <sys/types.h>
#include <ucp/api/ucp.h>

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/wire.h"
#include "transport/transport.h"

namespace sordino::ucx {

// A tag of UCX's, from the highest bit: 16 bits of the world's secret, whether it is a control message, its sender, and
// the transfer's tag or the control message's use.
inline constexpr int kRankBits = 20;
inline constexpr ucp_tag_t kRankMask = ((ucp_tag_t{1} << kRankBits) - 1) << kTagBits;
inline constexpr ucp_tag_t kControl = ucp_tag_t{1} << (kTagBits + kRankBits);
inline constexpr ucp_tag_t kSecretMask = ~((kControl << 1) - 1);
// Of a control message. The latter two are empty, or between processes and of no world.
enum class Use : std::uint32_t { kMessage, kHello, kLeave };

void check(ucs_status_t status, const char* what);
// What has become of a request; once it is done it is freed, and its status takes its place.
ucs_status_t status_of(void*& request);

struct Endpoint {
  ucp_ep_h handle = nullptr;
  bool lost = false;
  std::string cause;
};

// Memory that UCX works on, and what it has returned for it.
struct Buffer {
  Bytes bytes;
  void* request = nullptr;
};

class Session {
 public:
  // Made by the first call. A process that ends waits for the others so many seconds at most.
  static Session& of_this_process(double patience_s);

  std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(mutex_); }
  ucp_worker_h worker() const { return worker_; }
  const Bytes& address() const { return address_; }
  bool takes_cuda() const;
  bool is_ours() const;   // and not that of a process which this one was forked from
  bool progress() const;  // until nothing moves, within bounds; whether anything has

  // The endpoint to the process with this address; it may be lost already.
  Endpoint& reach(const Bytes& address);
  void lose(Endpoint& endpoint, ucs_status_t status);
  // Closes what has been lost. Not from within UCX.
  void close_lost();
  // What a world leaves behind half way.
  void keep(Buffer buffer);
  void will_not_wait() { waits_ = false; }

 private:
  explicit Session(double patience_s);
  static void end_of_endpoint(void* endpoint, ucp_ep_h handle, ucs_status_t status);
  void take_leave();

  std::recursive_mutex mutex_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  Bytes address_;
  const pid_t owner_;
  const double patience_s_;
  bool waits_ = true;
  std::map<std::string, std::unique_ptr<Endpoint>> endpoints_;  // by address
  std::vector<ucp_ep_h> lost_;                                  // to be closed
  std::list<Buffer> kept_;
};

}  // namespace sordino::ucx
