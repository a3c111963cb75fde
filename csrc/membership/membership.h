// Who is there: one rank's transport for the whole job, and the epoch that it is in. Every message carries its epoch,
// so what belongs to an older one is dropped and what belongs to a later one waits. A loss begins an agreement on the
// next epoch (agreement.h); a world of that epoch communicates through the transport that enter() gives.
//
// A death is certain where the kernel has seen the process end, or the rank has said that it leaves. It is suspected
// where a rank has been silent for longer than the deadline: all say a few times within it that they are alive, from
// the thread that polls, which needs no interpreter's lock.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/awake_clock.h"
#include "membership/agreement.h"
#include "transport/transport.h"

namespace sordino::membership {

class Membership : public std::enable_shared_from_this<Membership> {
 public:
  // silence_s: after how many seconds a rank that says nothing is taken for lost.
  Membership(std::unique_ptr<Transport> transport, double silence_s);

  // A transport between the members of the newest epoch. It is the only one that may be used from now on.
  std::unique_ptr<Transport> enter();

  Transport& transport() { return *transport_; }
  const View& view() const { return view_; }

  // Delivers what has arrived for `epoch`, as from ranks of epoch 0; looks after everything else. True if anything
  // moved.
  bool poll(std::uint32_t epoch, const Sink& sink);
  void post(std::uint32_t epoch, int to, const Bytes& message);

  // Whether `epoch` is over, or about to be.
  bool over(std::uint32_t epoch) const { return view_.epoch > epoch || agreement_->begun() || ended(); }
  // Whether the members have agreed on an epoch after it, in which nobody is known to be lost.
  bool past(std::uint32_t epoch) const { return view_.epoch > epoch && !agreement_->begun(); }
  // Why `epoch` is over, as the error that its operations raise.
  std::exception_ptr reason(const View& of) const;
  // This rank cannot go on: too few are left, or the others have gone on without it.
  bool ended() const { return end_ != End::kNone; }

  // Facts from above, of ranks of epoch 0.
  void blame(const std::vector<int>& silent, const std::vector<int>& stuck, const std::string& cause);
  void left(int rank);
  // This rank leaves, and has told the ranks of its epoch; who has begun to agree on the next one must know it too.
  void say_goodbye();
  // This rank leaves the others in the lurch.
  void depart(const std::string& cause);
  void begin();
  void count_tags(int next) { agreement_->count_tags(next); }
  // Losses do not end the epoch, but are told by take_losses().
  void outlive_peers() { outlives_ = true; }
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
  std::unique_ptr<Agreement> make_agreement();

  const std::unique_ptr<Transport> transport_;
  const double silence_s_;
  const int self_;
  View view_;
  std::unique_ptr<Agreement> agreement_;  // on the epoch after view_
  std::vector<View> history_;             // by epoch
  std::map<int, std::string> dead_;       // of all epochs
  std::map<int, std::string> blamed_;     // why the last epoch ended
  std::vector<Held> held_;
  End end_ = End::kNone;
  std::string ending_;
  bool outlives_ = false;
  std::vector<Loss> losses_;
  AwakeClock clock_;
  std::vector<AwakeTime> heard_;
  std::vector<bool> was_watched_;
  Time last_tick_, last_alive_, last_ask_;
};

}  // namespace sordino::membership
