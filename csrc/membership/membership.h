// Membership of one rank: its transport for the whole job, and the epoch that it is in. Every message carries its
// epoch. Messages of an older epoch are dropped, and messages of a later one are kept until then.
//
//   in an epoch    a world uses the transport that enter() gives; messages of the epoch are delivered
//   agreeing       begun by a loss (consensus.h); the epoch is over(), and its messages are dropped
//   next epoch     view() is the agreed one; the old epoch is past()
//   ended          kEvicted: the others continue without this rank, or it has left; kNoQuorum: too few ranks answer it
//
// A death is certain if the kernel has seen the process end, or if the rank has said that it leaves. It is suspected if
// a rank has been silent for longer than the deadline. Within the deadline, all ranks report several times that they
// are alive, from the polling thread, which needs no interpreter lock.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/awake_clock.h"
#include "membership/consensus.h"
#include "transport/transport.h"

namespace sordino::membership {

class Membership : public std::enable_shared_from_this<Membership> {
 public:
  // silence_s: seconds of silence after which a rank counts as lost.
  Membership(std::unique_ptr<Transport> transport, double silence_s);

  // Makes a transport between the members of the newest epoch. Older transports must not be used from then on.
  std::unique_ptr<Transport> enter();

  Transport& transport() { return *transport_; }
  const View& view() const { return view_; }

  // Delivers messages for `epoch`, with senders numbered as in epoch 0, and does all other work of the membership. True
  // if anything moved.
  bool poll(std::uint32_t epoch, const Sink& sink);
  void post(std::uint32_t epoch, int to, const Bytes& message);

  // True if `epoch` is over, or about to be.
  bool over(std::uint32_t epoch) const { return view_.epoch > epoch || consensus_->begun() || ended(); }
  // True if the members have agreed on a later epoch in which no rank is known to be lost.
  bool past(std::uint32_t epoch) const { return view_.epoch > epoch && !consensus_->begun(); }
  // Reason why `epoch` is over, as the error that its operations raise.
  std::exception_ptr reason(const View& of) const;
  // True if this rank cannot continue: too few ranks are left, the others have continued without it, or it has left.
  bool ended() const { return end_ != End::kNone; }

  // Facts reported by the world, about ranks numbered as in epoch 0.
  void set_waits(Waits waits) { consensus_->set_waits(std::move(waits)); }
  void blame(const std::vector<int>& silent, const std::vector<int>& stuck, const std::string& cause);
  void left(int rank);
  // Tells all members that this rank leaves. Its world has told them, too, but ranks that have begun to agree on the
  // next epoch no longer read the world's messages.
  void say_goodbye();
  // Announces an abnormal exit of this rank to all members.
  void depart(const std::string& cause);
  void begin();
  void count_tags(int next) { consensus_->count_tags(next); }
  // From now on losses do not end the epoch; take_losses() reports them.
  void tolerate_losses() { tolerates_losses_ = true; }
  std::vector<Loss> take_losses();

 private:
  enum class Notice : std::uint8_t { kAlive, kAgree, kAsk, kGoodbye, kFarewell };
  enum class End { kNone, kNoQuorum, kEvicted };
  struct Held {
    int from;
    std::uint32_t epoch;
    Bytes message;
  };

  void route(std::uint32_t epoch, int from, std::span<const std::byte> bytes, const Sink& sink);
  void notice(int from, Reader& reader);
  void tick(Time now, std::uint32_t epoch, const Sink& sink);
  bool receive(std::uint32_t epoch, const Sink& sink);
  void look_for_losses(std::uint32_t epoch, const Sink& sink);
  void lose(const Loss& loss);
  void say_alive();
  void look_for_silence();
  std::vector<int> watched() const;
  void follow();
  void send(int to, Notice kind, std::uint32_t epoch, const Bytes& rest = {});
  std::unique_ptr<Consensus> make_consensus();

  const std::unique_ptr<Transport> transport_;
  const double silence_s_;
  const int self_;
  View view_;
  std::unique_ptr<Consensus> consensus_;  // on the epoch after view_
  std::vector<View> history_;             // by epoch
  std::map<int, std::string> dead_;       // in any epoch
  std::map<int, std::string> blamed_;     // by rank: causes of the end of the last epoch
  std::vector<Held> held_;
  End end_ = End::kNone;
  std::string ending_;
  bool tolerates_losses_ = false;
  std::vector<Loss> losses_;
  AwakeClock clock_;
  std::vector<AwakeTime> heard_;
  std::vector<bool> was_watched_;
  Time last_tick_, last_alive_, last_ask_;
};

}  // namespace sordino::membership
