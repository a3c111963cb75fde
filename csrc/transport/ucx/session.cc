#include "transport/ucx/session.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>
#include <thread>
#include <utility>

#include "base/awake_clock.h"
#include "base/error.h"

namespace sordino::ucx {
namespace {

constexpr std::size_t kLongestAddress = 1 << 16;

Session* session = nullptr;  // never destroyed: it exists until the process ends

std::string key_of(const Bytes& address) {
  return std::string(reinterpret_cast<const char*>(address.data()), address.size());
}

// Sets an option of UCX unless the environment sets it.
void prefer(ucp_config_t* config, const std::string& name, const char* value) {
  if (std::getenv(("UCX_" + name).c_str()) == nullptr) check(ucp_config_modify(config, name.c_str(), value), "UCX");
}

}  // namespace

void check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) throw TransportError(std::string(what) + " failed: " + ucs_status_string(status));
}

ucs_status_t status_of(void*& request) {
  if (!UCS_PTR_IS_PTR(request)) return UCS_PTR_RAW_STATUS(request);
  const ucs_status_t status = ucp_request_check_status(request);
  if (status == UCS_INPROGRESS) return status;
  ucp_request_free(request);
  request = UCS_STATUS_PTR(status);
  return status;
}

Session& Session::of_this_process(double patience_s) {
  static std::mutex making;
  std::lock_guard alone(making);
  if (session == nullptr) {
    session = new Session(patience_s);
    std::atexit([] { session->take_leave(); });
  }
  if (!session->is_ours()) throw UsageError("this process was forked after init(), so it is not a rank");
  return *session;
}

Session::Session(double patience_s) : owner_(getpid()), patience_s_(patience_s) {
  ucp_config_t* config = nullptr;
  check(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  // This link never uses shared memory: within a node Sordino's own is used (shm/). UCX's fails between emulated nodes,
  // and between namespaces on one machine.
  prefer(config, "TLS", "^sm");
  // Connecting to a host that does not answer must not delay connections to the others.
  prefer(config, "TCP_CONN_NB", "y");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_TAG_SENDER_MASK;
  params.features = UCP_FEATURE_TAG;
  params.tag_sender_mask = kRankMask;
  const ucs_status_t initialized = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  check(initialized, "ucp_init");
  ucp_worker_params_t how{};
  how.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  how.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  const ucs_status_t created = ucp_worker_create(context_, &how, &worker_);
  if (created != UCS_OK) ucp_cleanup(context_);
  check(created, "ucp_worker_create");
  ucp_address_t* address = nullptr;
  std::size_t size = 0;
  check(ucp_worker_get_address(worker_, &address, &size), "ucp_worker_get_address");
  const auto* data = reinterpret_cast<const std::byte*>(address);
  address_.assign(data, data + size);
  ucp_worker_release_address(worker_, address);
}

bool Session::is_ours() const { return getpid() == owner_; }

bool Session::takes_cuda() const {
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  return ucp_context_query(context_, &attributes) == UCS_OK &&
         (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
}

bool Session::progress() const {
  constexpr int kMost = 64;
  int times = 0;
  while (times < kMost && ucp_worker_progress(worker_) != 0) ++times;
  return times > 0;
}

Endpoint& Session::reach(const Bytes& address) {
  std::unique_ptr<Endpoint>& place = endpoints_[key_of(address)];
  if (place) {
    place->waited_for = true;
    return *place;
  }
  place = std::make_unique<Endpoint>();
  place->waited_for = true;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {end_of_endpoint, place.get()};
  const ucs_status_t status = ucp_ep_create(worker_, &params, &place->handle);
  if (status != UCS_OK) {
    place->handle = nullptr;
    lose(*place, status);
  }
  return *place;
}

void Session::end_of_endpoint(void* endpoint, ucp_ep_h, ucs_status_t status) {
  session->lose(*static_cast<Endpoint*>(endpoint), status);
}

void Session::lose(Endpoint& endpoint, ucs_status_t status) {
  if (endpoint.lost) return;
  endpoint.lost = true;
  endpoint.cause = std::string("UCX can no longer reach it (") + ucs_status_string(status) + ")";
  // The endpoint is closed later, because UCX may be in the middle of a call.
  if (endpoint.handle != nullptr) lost_.push_back(std::exchange(endpoint.handle, nullptr));
}

void Session::close_lost() {
  ucp_request_param_t by_force{};
  by_force.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  by_force.flags = UCP_EP_CLOSE_FLAG_FORCE;
  for (const ucp_ep_h handle : std::exchange(lost_, {})) keep({{}, ucp_ep_close_nbx(handle, &by_force)});
}

void Session::will_not_wait() {
  const auto held = lock();
  for (const auto& [address, endpoint] : endpoints_) endpoint->waited_for = false;
}

void Session::keep(Buffer buffer) {
  kept_.remove_if([](Buffer& one) { return status_of(one.request) != UCS_INPROGRESS; });
  if (status_of(buffer.request) == UCS_INPROGRESS) kept_.push_back(std::move(buffer));
}

// Tells all processes that this one will send nothing more, and waits until they have received that and have said the
// same. Then no message is in flight that a closed connection could drop. Does not wait for lost processes, for
// processes that have exchanged nothing with this one, or after will_not_wait().
void Session::take_leave() {
  if (!is_ours()) return;
  const auto held = lock();
  const ucp_request_param_t plain{};
  const ucp_tag_t leave = kControl | static_cast<ucp_tag_t>(Use::kLeave);
  std::map<const Endpoint*, void*> sends;
  for (const auto& [address, endpoint] : endpoints_) {
    if (endpoint->waited_for && !endpoint->lost)
      sends[endpoint.get()] = ucp_tag_send_sync_nbx(endpoint->handle, address_.data(), address_.size(), leave, &plain);
  }
  std::set<const Endpoint*> left;
  const auto over = [&](auto& one) {
    const auto& [address, endpoint] = one;
    return !endpoint->waited_for || endpoint->lost ||
           (left.contains(endpoint.get()) && status_of(sends[endpoint.get()]) != UCS_INPROGRESS);
  };
  Deadline limit{std::chrono::duration<double>(patience_s_)};
  while (!std::all_of(endpoints_.begin(), endpoints_.end(), over) && !limit.passed()) {
    if (!progress()) std::this_thread::sleep_for(std::chrono::microseconds(200));
    close_lost();
    ucp_tag_recv_info_t info{};
    while (const ucp_tag_message_h message = ucp_tag_probe_nb(worker_, leave, ~kRankMask, 1, &info)) {
      Buffer who{Bytes(std::min(info.length, kLongestAddress)), nullptr};
      who.request = ucp_tag_msg_recv_nbx(worker_, who.bytes.data(), who.bytes.size(), message, &plain);
      while (status_of(who.request) == UCS_INPROGRESS && !limit.passed()) progress();
      const auto known = endpoints_.find(key_of(who.bytes));
      if (known != endpoints_.end()) left.insert(known->second.get());
    }
  }
}

}  // namespace sordino::ucx
