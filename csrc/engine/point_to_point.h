// Point-to-point messages of one rank. Messages match receives by process set, source and tag, in the order in which
// they were sent (message_queues.h).
//
//   size of a message      to a rank of another node         to a node peer
//   up to kWholeBytes      a control message                 the fast box to that rank (fast_box.h)
//   larger                 announced, then a transfer        announced in the fast box. The receiver copies data that
//                          that the receiver asks for        it can reach, and asks for a transfer of other data
//
// A message of up to kWholeBytes travels whole: its send is complete once the message is written, and the receiver
// buffers it until a receive takes it. The sender counts the bytes that each receiver may buffer. Beyond kBufferedBytes
// it announces small messages, too. So messages keep their order, and memory is bounded.
//
//   Word        sent to        meaning
//   kEnvelope   the receiver   a message whose payload follows
//   kFastBox    the receiver   the location of the sender's fast box
//   kAsk        the sender     a receive has taken the announced message; send the data under this tag
//   kTaken      the sender     the receiver has copied the data of an announced message
//   kRefused    the sender     the receive that took the message has another size or dtype, or no receive took it
//                              before its process set was removed
//   kConsumed   the sender     receives have taken this many counted bytes (a fast box has a counter instead)
//
// A mismatch of size or dtype ends the send and the receive with OperationMismatch. If the send is already complete,
// the sender's next call that names the receiver raises the error instead, and does nothing else. If the process set
// was removed, the send fails with UsageError.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/common.h"
#include "engine/fast_box.h"
#include "engine/message.h"
#include "engine/message_queues.h"
#include "engine/service_host.h"

namespace sordino {

// The polling thread, or one that keeps others from polling, calls all functions without a comment on threads.
class PointToPoint {
 public:
  static constexpr std::size_t kWholeBytes = 64 * 1024;
  // Limit of the bytes that a receiver buffers for one sender, with kOverhead added for each message.
  static constexpr std::size_t kBufferedBytes = 1024 * 1024, kOverhead = 256;

  // `services` provides the tags of transfers.
  PointToPoint(Common& common, ServiceHost& services);

  // Queues a valid call for begin_submitted() or advance(). Throws the error of a failed world. From any thread.
  std::shared_ptr<Handle> submit(std::shared_ptr<Posting> posting);
  // True if any call of this rank is unfinished. From any thread.
  bool busy() const { return unfinished_.load() > 0; }

  // Starts the calls that have been queued.
  void begin_submitted();
  // Starts queued calls, and advances all others. True if anything moved.
  bool advance();
  // Reads only the fast boxes, which takes a few nanoseconds if nothing has arrived. True if anything moved.
  bool read_boxes();
  // Handles a control message of another rank. Throws TransportError if the message is invalid.
  void receive(int from, Reader& reader);
  // Handles the departure or loss of a rank in a world that continues.
  void lost(int rank);
  // Ends calls with a transfer to or from a rank that has been gone for more than 1 s. Call this regularly.
  void give_up_deserted(AwakeTime now);
  // Ends all calls with `why`: the world has failed or been shut down.
  void end(const std::exception_ptr& why);

  // Visits all unfinished calls, with the ranks that each waits for.
  void visit(const std::function<void(Posting&, const std::vector<int>& missing)>& visitor);
  // Description of the unfinished call with this handle; empty if there is none.
  std::string text_of(const Handle& handle);

  // Keeps the fast boxes for peers that have not read all messages yet. Called once, when this rank leaves.
  void leave_boxes();
  // Leaks given-up transfers, because they may still touch their memory.
  void keep();

 private:
  enum class Word : std::uint8_t { kEnvelope, kFastBox, kAsk, kTaken, kRefused, kConsumed };
  static constexpr Word kLastWord = Word::kConsumed;
  enum class Refusal : std::uint8_t { kMismatch, kRemoved };
  static constexpr Refusal kLastRefusal = Refusal::kRemoved;
  using Numbered = std::map<std::uint64_t, std::shared_ptr<Posting>>;

  // Messages to one rank.
  struct Outgoing {
    std::shared_ptr<Segment> segment;
    std::optional<FastBox> box;
    std::deque<std::shared_ptr<Posting>> queue;  // sends whose envelopes have not left
    Numbered announced;                          // sends whose envelopes have left, by number
    std::uint64_t last_number = 0;
    std::uint64_t sent = 0, consumed = 0;  // bytes of whole messages; a fast box has its own `consumed`
    std::string refused;                   // error for the next call
  };
  // Messages from one rank.
  struct Incoming {
    std::optional<FastBox> box;
    std::shared_ptr<Arrival> arriving;  // in the fast box
    std::uint64_t unreported = 0;       // consumed bytes not yet reported to the sender
  };
  // A transfer of the data of an announced message.
  struct Moving {
    std::shared_ptr<Posting> posting;
    int peer;
    std::unique_ptr<Transfer> transfer;
    std::optional<AwakeTime> deserted = {};  // when this rank noticed that the peer is gone
  };

  static std::size_t cost(const Envelope& envelope) { return kOverhead + envelope.bytes; }
  bool is_near(int rank) const;
  void post(int to, Writer& message);
  void finish(Posting& posting, std::exception_ptr error = nullptr);
  std::exception_ptr departed(const Posting& posting, int rank) const;
  static std::exception_ptr without_set(const Posting& posting);

  // Sending.
  void start_send(const std::shared_ptr<Posting>& send);
  void send_to_self(const std::shared_ptr<Posting>& send);
  Envelope describe(const Posting& send, Outgoing& out, bool whole) const;
  std::uint64_t buffered(const Outgoing& out) const;
  bool flush(int to);
  bool put(int to, const std::shared_ptr<Posting>& send);
  void open_box(int to);
  std::shared_ptr<Posting> take_announced(int from, std::uint64_t number);
  void give(int to, std::uint64_t number, Tag tag);
  void take_refusal(int from, Reader& reader);

  // Receiving.
  void start_receive(const std::shared_ptr<Posting>& receive);
  std::shared_ptr<Arrival> begin(int from, const Envelope& envelope);
  void hand_over(const std::shared_ptr<Posting>& receive, const Arrival& message);
  void deliver(const std::shared_ptr<Posting>& receive, const Arrival& message);
  void refuse(Posting& receive, const Arrival& message);
  void take_data(const std::shared_ptr<Posting>& receive, const Arrival& message);
  bool copy_from(Posting& receive, const Arrival& message, const Location& place);
  void give_back(int from, std::size_t bytes);
  void drop(const Arrival& message);
  void map_box(int from, const Location& place);
  bool read_box(int from);
  void require_valid(int from, const Envelope& envelope) const;

  // Begins a transfer. False if the peer is lost and the world continues; then the posting has ended with the error.
  bool move(const std::shared_ptr<Posting>& posting, int peer, const std::function<std::unique_ptr<Transfer>()>& begin);
  bool advance_transfers();
  void give_up(Moving& moving, std::exception_ptr error);
  bool is_without_source(const Posting& receive) const;
  // Ends the calls on removed process sets, except calls whose transfer has begun, and announced sends (the receiver
  // answers them).
  void end_removed();
  bool is_removed(int set) const { return common_.removed_sets.contains(set); }
  void complete(const Arrival& message);

  Common& common_;
  ServiceHost& services_;
  const int rank_;
  std::map<int, Outgoing> out_;  // by rank; only ranks with messages, so it does not grow with the size of the world
  std::map<int, Incoming> in_;   // the same
  std::vector<int> boxes_;       // ranks whose fast boxes are mapped
  int queued_ = 0;               // sends in Outgoing::queue
  MessageQueues queues_;
  std::list<Moving> moving_;
  std::list<Moving> given_up_;  // these transfers may still touch their memory
  std::size_t removed_ = 0;     // number of removed sets that end_removed() has handled

  std::atomic<int> unfinished_{0};
  std::mutex mutex_;  // guards submitted_
  std::vector<std::shared_ptr<Posting>> submitted_;
  std::atomic<bool> submitted_any_{false};
};

}  // namespace sordino
