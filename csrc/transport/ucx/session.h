// UCX session of this process: one context, one worker, and an endpoint for each process that it talks to.
//
//   created         by the first UcxLink
//   in use          by the links of all worlds, which come and go; endpoints stay, because closing a connection drops
//                   data that the other side has not read yet
//   taking leave    at the end of the process: processes wait for each other, as in MPI_Finalize, within a time limit
//
// The worker makes progress only while a thread polls, because UCX has no thread here. Worlds are polled by different
// threads, so every call of UCX needs the lock.
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

// A UCX tag, from the highest bit: 16 bits of the world's secret, one bit for control messages, the sender, and either
// the transfer's tag or the use of the control message.
inline constexpr int kRankBits = 20;
inline constexpr ucp_tag_t kRankMask = ((ucp_tag_t{1} << kRankBits) - 1) << kTagBits;
inline constexpr ucp_tag_t kControl = ucp_tag_t{1} << (kTagBits + kRankBits);
inline constexpr ucp_tag_t kSecretMask = ~((kControl << 1) - 1);
// Use of a control message. kHello is empty; kLeave is between processes, and belongs to no world.
enum class Use : std::uint32_t { kMessage, kHello, kLeave };

void check(ucs_status_t status, const char* what);
// Status of a request. A finished request is freed and replaced by its status.
ucs_status_t status_of(void*& request);

struct Endpoint {
  ucp_ep_h handle = nullptr;
  bool lost = false;
  bool waited_for = false;  // at the end of the process
  std::string cause;
};

// Memory that UCX works on, and the request that UCX has returned for it.
struct Buffer {
  Bytes bytes;
  void* request = nullptr;
};

class Session {
 public:
  // Created by the first call. At its end, a process waits for the others for at most `patience_s` seconds.
  static Session& of_this_process(double patience_s);

  std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(mutex_); }
  ucp_worker_h worker() const { return worker_; }
  const Bytes& address() const { return address_; }
  bool takes_cuda() const;
  bool is_ours() const;   // false in a process forked from the owner
  bool progress() const;  // until nothing moves, or 64 times; true if anything moved

  // Endpoint to the process with this address. It may already be lost.
  Endpoint& reach(const Bytes& address);
  void lose(Endpoint& endpoint, ucs_status_t status);
  // Closes lost endpoints. Must not be called from within UCX.
  void close_lost();
  // Keeps a buffer that a world leaves behind as long as UCX may use it.
  void keep(Buffer buffer);
  // At its end, this process waits for none of the endpoints so far, except those that a later world uses again.
  void will_not_wait();

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
  std::map<std::string, std::unique_ptr<Endpoint>> endpoints_;  // by address
  std::vector<ucp_ep_h> lost_;                                  // still to be closed
  std::list<Buffer> kept_;
};

}  // namespace sordino::ucx
