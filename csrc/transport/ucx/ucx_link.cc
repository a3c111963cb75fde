#include "transport/ucx/ucx_link.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/rng.h"
#include "transport/ucx/plugin.h"

namespace sordino::ucx {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 28;  // of a control message

// True if this status of a request means that the peer is lost.
bool is_loss(ucs_status_t status) {
  constexpr ucs_status_t kLosses[] = {UCS_ERR_IO_ERROR,  UCS_ERR_UNREACHABLE,   UCS_ERR_CANCELED,
                                      UCS_ERR_TIMED_OUT, UCS_ERR_NOT_CONNECTED, UCS_ERR_CONNECTION_RESET,
                                      UCS_ERR_REJECTED};
  return std::find(std::begin(kLosses), std::end(kLosses), status) != std::end(kLosses) || UCS_IS_LINK_ERROR(status) ||
         UCS_IS_ENDPOINT_ERROR(status);
}

PeerLost lost(int rank, const std::string& cause) {
  return PeerLost("rank " + std::to_string(rank) + " is lost: " + cause, {rank});
}

std::string version() {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

// The digest is sent in clear text. It keeps out strangers, but not a process that reads the network's traffic. The
// token cannot be computed from it.
Digest digest_of(const std::string& token) {
  std::array<std::uint64_t, 2> words{1, 2};
  for (std::uint64_t& word : words) {
    for (const char letter : token) word = rng::key(word, static_cast<unsigned char>(letter));
  }
  Digest digest;
  static_assert(sizeof(words) == sizeof(digest));
  std::memcpy(digest.data(), words.data(), sizeof(words));
  return digest;
}

ucp_tag_t secret_of(const Digest& digest) {
  ucp_tag_t bits = 0;
  std::memcpy(&bits, digest.data(), sizeof(bits));
  return bits & kSecretMask;
}

}  // namespace

// ---- transfers -----------------------------------------------------------------------------------------------------

class UcxTransfer : public Transfer {
 public:
  // `request`: returned by UCX. `expected`: size of a receive in bytes; none for a send. `came`: bytes received, if the
  // receive has completed at once.
  UcxTransfer(UcxLink& link, UcxLink::Peer& peer, void* request, std::optional<std::size_t> expected = {},
              std::size_t came = 0)
      : link_(&link), peer_(peer), rank_(peer.rank), request_(request), expected_(expected), came_(came) {
    link.transfers_.insert(this);
  }
  ~UcxTransfer() override { let_go(); }

  bool test() override {
    if (error_) throw *error_;
    if (link_ == nullptr) return ended();
    const auto held = link_->session_.lock();
    ucs_status_t status = look();
    if (status == UCS_INPROGRESS) {
      ucp_worker_progress(link_->session_.worker());
      status = look();
    }
    if (status == UCS_INPROGRESS && !peer_.lost()) return false;
    if (status == UCS_OK && came_ == expected_.value_or(came_)) return true;
    fail(status);
  }

  // Result of test() after the link was destroyed.
  bool ended() {
    if (UCS_PTR_RAW_STATUS(request_) == UCS_OK && came_ == expected_.value_or(came_)) return true;
    fail(UCS_PTR_RAW_STATUS(request_));
  }

  // Releases the request, done or not. UCX may still complete it, but reports that to no object.
  void let_go() {
    if (link_ == nullptr) return;
    UcxLink& link = *std::exchange(link_, nullptr);
    void* request = UCS_PTR_IS_PTR(request_) ? std::exchange(request_, UCS_STATUS_PTR(UCS_ERR_CANCELED)) : nullptr;
    if (!link.session_.is_ours()) return;  // a forked child: another thread may have held the lock
    const auto held = link.session_.lock();
    if (request != nullptr && expected_) ucp_request_cancel(link.session_.worker(), request);
    if (request != nullptr) ucp_request_free(request);
    link.transfers_.erase(this);
  }

 private:
  ucs_status_t look() {
    if (expected_ && UCS_PTR_IS_PTR(request_)) {
      ucp_tag_recv_info_t info{};
      if (ucp_tag_recv_request_test(request_, &info) != UCS_INPROGRESS) came_ = info.length;
    }
    return status_of(request_);
  }

  [[noreturn]] void fail(ucs_status_t status) {
    const std::string who = "rank " + std::to_string(rank_);
    const std::string expected = std::to_string(expected_.value_or(0));
    if (status == UCS_OK)
      throw TransportError(who + " sent " + std::to_string(came_) + " bytes where " + expected + " were expected");
    if (status == UCS_ERR_MESSAGE_TRUNCATED)  // UCX does not always report how many bytes were sent
      throw TransportError(who + " sent more than the " + expected + " bytes that were expected");
    if (link_ == nullptr) throw TransportError("the link to " + who + " ended before a transfer did");
    if (is_loss(status)) link_->lose(peer_, status);
    if (!peer_.lost()) throw TransportError("a transfer with " + who + " failed in UCX: " + ucs_status_string(status));
    error_ = lost(rank_, peer_.endpoint->cause);
    let_go();  // a request posted for a lost peer never ends by itself
    throw *error_;
  }

  UcxLink* link_;
  UcxLink::Peer& peer_;  // valid while link_ is not null
  int rank_;
  void* request_;
  std::optional<std::size_t> expected_;  // set for receives
  std::size_t came_;
  std::optional<PeerLost> error_;
};

std::unique_ptr<Transfer> UcxLink::send(int to, Tag tag, std::span<const std::byte> data) {
  const auto held = session_.lock();
  Peer& peer = reach(to);
  const ucp_request_param_t plain{};
  void* request = peer.lost()
                      ? UCS_STATUS_PTR(UCS_ERR_NOT_CONNECTED)
                      : ucp_tag_send_nbx(peer.endpoint->handle, data.data(), data.size(), bulk_tag(rank_, tag), &plain);
  return std::make_unique<UcxTransfer>(*this, peer, request);
}

std::unique_ptr<Transfer> UcxLink::receive(int from, Tag tag, std::span<std::byte> data) {
  const auto held = session_.lock();
  Peer& peer = reach(from);  // without an endpoint, the death of the peer would not be noticed
  ucp_tag_recv_info_t info{};
  ucp_request_param_t asking{};
  asking.op_attr_mask = UCP_OP_ATTR_FIELD_RECV_INFO;
  asking.recv_info.tag_info = &info;
  void* request =
      ucp_tag_recv_nbx(session_.worker(), data.data(), data.size(), bulk_tag(from, tag), ~ucp_tag_t{0}, &asking);
  return std::make_unique<UcxTransfer>(*this, peer, request, data.size(), info.length);
}

// ---- peers ---------------------------------------------------------------------------------------------------------

UcxLink::UcxLink(Meeting& meeting, const Config& config, const std::string& token)
    : session_(Session::of_this_process(config.timeout_s)),
      rank_(meeting.rank()),
      peers_(static_cast<std::size_t>(meeting.size())),
      takes_device_memory_(config.cuda_aware < 0 ? session_.takes_cuda() : config.cuda_aware == 1) {
  const int size = meeting.size();
  if (size > 1 << kRankBits)
    throw UsageError("a link by UCX supports at most 2^" + std::to_string(kRankBits) + " ranks");
  // A different secret for each world, so that messages left from an earlier world match no receive.
  digest_ = digest_of(token + shared_secret(meeting));
  secret_ = secret_of(digest_);
  const std::vector<Bytes> addresses = meeting.gather(session_.address());
  for (int rank = 0; rank < size; ++rank) {
    peer(rank).rank = rank;
    peer(rank).address = addresses[static_cast<std::size_t>(rank)];
  }
  const auto held = session_.lock();
  for (const int neighbor : {(rank_ + 1) % size, (rank_ + size - 1) % size}) {
    if (neighbor != rank_ && !reach(neighbor).lost()) send_frame(peer(neighbor), {}, Use::kHello);
  }
}

// Waits for no rank. Posted messages have reached their peers if idle() was true.
UcxLink::~UcxLink() {
  for (UcxTransfer* one : std::set(transfers_)) one->let_go();
  if (!session_.is_ours()) return;
  const auto held = session_.lock();
  session_.keep({{}, flushing_});
  for (Frames* frames : {&outgoing_, &incoming_}) {
    for (Frame& frame : *frames) session_.keep(std::move(frame));
  }
}

// Returns the peer. Creates its endpoint if needed.
UcxLink::Peer& UcxLink::reach(int rank) {
  Peer& wanted = peer(rank);
  if (wanted.endpoint == nullptr) wanted.endpoint = &session_.reach(wanted.address);
  return wanted;
}

std::vector<Loss> UcxLink::take_losses() {
  const auto held = session_.lock();
  std::vector<Loss> losses;
  for (Peer& one : peers_) {
    if (one.lost() && !std::exchange(one.reported, true)) losses.push_back({one.rank, one.endpoint->cause, false});
  }
  return losses;
}

// ---- control messages ----------------------------------------------------------------------------------------------

ucp_tag_t UcxLink::bulk_tag(int sender, Tag tag) const {
  return secret_ | static_cast<ucp_tag_t>(sender) << kTagBits | tag;
}

ucp_tag_t UcxLink::control_tag(int sender, Use use) const { return kControl | bulk_tag(sender, static_cast<Tag>(use)); }

void UcxLink::post(int to, Bytes message) {
  if (message.size() > kMostBytes - sizeof(Digest))
    throw UsageError("a control message of " + std::to_string(message.size()) + " bytes is longer than the limit of " +
                     std::to_string(kMostBytes - sizeof(Digest)) + " bytes");
  const auto held = session_.lock();
  Peer& target = reach(to);
  // Makes progress first, because the goodbye of a peer that has ended may wait to be received. Throws only once
  // take_losses() has reported the loss, because the engine looks for that goodbye only then.
  session_.progress();
  if (!target.lost()) {
    message.insert(message.end(), digest_.begin(), digest_.end());
    send_frame(target, std::move(message), Use::kMessage);
  } else if (target.reported && !tolerates_losses_) {
    throw lost(to, target.endpoint->cause);
  }
}

void UcxLink::send_frame(Peer& to, Bytes bytes, Use use) {
  Frame& frame = outgoing_.emplace_back();
  frame.bytes = std::move(bytes);
  frame.peer = &to;
  const ucp_request_param_t plain{};
  frame.request =
      ucp_tag_send_nbx(to.endpoint->handle, frame.bytes.data(), frame.bytes.size(), control_tag(rank_, use), &plain);
  if (UCS_PTR_IS_PTR(frame.request)) return;
  const ucs_status_t status = UCS_PTR_RAW_STATUS(frame.request);
  outgoing_.pop_back();
  if (status != UCS_OK) lose(to, status);
}

// UCX queues messages that it could not send at once, and the worker makes no progress after the end of the world.
bool UcxLink::idle() const {
  const auto held = session_.lock();
  if (!outgoing_.empty()) return false;
  if (flushing_ == nullptr) {
    const ucp_request_param_t plain{};
    flushing_ = ucp_worker_flush_nbx(session_.worker(), &plain);
  }
  if (status_of(flushing_) == UCS_INPROGRESS) return false;
  flushing_ = nullptr;
  return true;
}

bool UcxLink::poll(const Sink& sink) {
  bool moved = false;
  {
    const auto held = session_.lock();
    moved = session_.progress();
    while (take()) moved = true;
    session_.close_lost();
    finish_sending();
  }
  return deliver(sink) || moved;
}

void UcxLink::finish_sending() {
  outgoing_.remove_if([this](Frame& frame) {
    const ucs_status_t status = status_of(frame.request);
    if (status != UCS_OK && status != UCS_INPROGRESS) lose(*frame.peer, status);
    return status != UCS_INPROGRESS;
  });
}

// Begins to receive the next control message. Returns false if no message has come.
bool UcxLink::take() {
  ucp_tag_recv_info_t info{};
  const ucp_tag_message_h message =
      ucp_tag_probe_nb(session_.worker(), secret_ | kControl, kSecretMask | kControl, 1, &info);
  if (message == nullptr) return false;
  const int from = static_cast<int>((info.sender_tag & kRankMask) >> kTagBits);
  const bool is_peer = from != rank_ && from < static_cast<int>(peers_.size());
  const ucp_request_param_t plain{};
  if (is_peer && info.sender_tag == control_tag(from, Use::kMessage) && info.length >= sizeof(Digest) &&
      info.length <= kMostBytes) {
    Frame& frame = incoming_.emplace_back();
    frame.bytes.resize(info.length);
    frame.peer = &reach(from);
    frame.request = ucp_tag_msg_recv_nbx(session_.worker(), frame.bytes.data(), info.length, message, &plain);
    return true;
  }
  if (!is_peer || info.sender_tag != control_tag(from, Use::kHello)) warn_of_stranger();
  session_.keep({{}, ucp_tag_msg_recv_nbx(session_.worker(), nullptr, 0, message, &plain)});  // drops it
  return true;
}

// Returns the first complete message that does not follow an incomplete message of the same rank.
UcxLink::Frames::iterator UcxLink::next_whole() {
  std::vector<const Peer*> waiting;
  for (auto next = incoming_.begin(); next != incoming_.end();) {
    const auto frame = next++;
    Peer& from = *frame->peer;
    if (std::find(waiting.begin(), waiting.end(), &from) != waiting.end()) continue;
    const ucs_status_t status = status_of(frame->request);
    if (status == UCS_INPROGRESS && !from.lost()) {
      waiting.push_back(&from);
    } else if (status == UCS_OK && !from.torn) {
      const Bytes& bytes = frame->bytes;
      if (std::equal(digest_.begin(), digest_.end(), bytes.end() - sizeof(Digest))) return frame;
      warn_of_stranger();
      incoming_.erase(frame);
    } else {  // it will never be complete, so later messages of this rank are dropped, too
      lose(from, status);
      from.torn = true;
      session_.keep(std::move(*frame));
      incoming_.erase(frame);
    }
  }
  return incoming_.end();
}

// Removes each message from the list before delivering it, so that it is delivered once even if the sink throws.
bool UcxLink::deliver(const Sink& sink) {
  bool given = false;
  for (;;) {
    auto held = session_.lock();
    const auto frame = next_whole();
    if (frame == incoming_.end()) return given;
    const int from = frame->peer->rank;
    const Bytes bytes = std::move(frame->bytes);
    incoming_.erase(frame);
    given = true;
    held.unlock();  // the sink does not need the lock
    sink(from, std::span(bytes).first(bytes.size() - sizeof(Digest)));
  }
}

void UcxLink::warn_of_stranger() {
  if (std::exchange(warned_, true)) return;
  log::say(log::Level::kWarning, rank_,
           "rank " + std::to_string(rank_) + " has dropped a message that does not belong to this job");
}

}  // namespace sordino::ucx

extern "C" {

__attribute__((visibility("default"))) sordino::Link* sordino_ucx_connect(sordino::Meeting* meeting,
                                                                          const sordino::Config* config,
                                                                          const std::string* token) {
  return new sordino::ucx::UcxLink(*meeting, *config, *token);
}

__attribute__((visibility("default"))) const char* sordino_ucx_describe() {
  static const std::string text = "UCX " + sordino::ucx::version();
  return text.c_str();
}
}
