// The members of an epoch agree on the next one. This is Paxos for a single decision: its acceptors are the members
// that have not certainly died, so whoever decides has been heard by more than half of them, and the parts of a divided
// world never both go on. A machine without a clock or a network: it is told facts, and says whom to send what.
//
//   begun --(leads: kPrepare to all)--> preparing --(all that answer have promised)--> proposing --(most accept)-->
//   decided
//
// Source: Lamport, Paxos Made Simple (2001). What is proposed, if nothing has been accepted before, is the leader and
// all that have promised, less those whom others cannot work with.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/wire.h"
#include "membership/view.h"

namespace sordino::membership {

class Agreement {
 public:
  using Send = std::function<void(int to, const Bytes& message)>;

  // `self` and all ranks are those of epoch 0.
  Agreement(View from, int self, Send send);

  // Facts. A rank that is dead has certainly ended, or said that it leaves. One that is silent does not answer. One
  // that is accused answers, but this rank cannot work with it.
  void bury(int rank, const std::string& cause);
  void silence(int rank, const std::string& cause);
  void accuse(int rank, const std::string& cause);
  // It has been heard of.
  void hear(int rank);
  // Tags from this one on have not been used by this rank.
  void count_tags(int next) { next_tag_ = std::max(next_tag_, next); }

  // This rank wants another epoch. So does whoever hears of it.
  void begin();
  bool begun() const { return begun_; }
  void receive(int from, Reader& message);
  // To be called now and then: who leads tries again if it was refused, and asks those again that have not answered;
  // the others tell it again that there is something to agree on.
  void retry();

  const std::optional<View>& decided() const { return decided_; }
  // Whether this rank still hears of more than half of those that have not certainly died.
  bool has_quorum() const;
  const View& from() const { return from_; }
  bool is_dead(int rank) const { return dead_.contains(rank); }
  bool is_silent(int rank) const { return silent_.contains(rank); }
  // Who is lost or stuck as far as this rank knows, and why.
  std::map<int, std::string> blamed() const;
  // What tells another rank what has been decided.
  static Bytes verdict(const View& view);
  static bool is_verdict(Reader message) { return message.one_of(kLastStep) == Step::kDecided; }

 private:
  enum class Step : std::uint8_t { kFacts, kPrepare, kPromise, kRefuse, kAccept, kAccepted, kDecided };
  static constexpr Step kLastStep = Step::kDecided;
  enum class Phase { kIdle, kPreparing, kProposing };
  using Ballot = std::uint64_t;
  struct Promise {
    std::vector<int> accused;
    int next_tag = 0;
    Ballot accepted = 0;
    std::optional<View> view;
  };

  std::vector<int> alive() const;
  bool most(std::size_t count) const { return 2 * count > alive().size(); }
  int leader() const;
  void lead();
  void start_ballot();
  Bytes prepare() const;
  Bytes accept() const;
  View choose() const;
  void decide(const View& view);
  void tell_facts();
  Bytes facts() const;
  void send_to_alive(const Bytes& message);
  View read_view(Reader& message) const;
  static int read_tag(int tag);
  void handle_facts(Reader& message);
  void handle_prepare(int from, Reader& message);
  void handle_promise(int from, Reader& message);
  void handle_accept(int from, Reader& message);

  const View from_;
  const int self_;
  const Send send_;
  std::map<int, std::string> dead_, silent_, accused_;
  int next_tag_ = 0;
  bool begun_ = false;
  std::optional<View> decided_;
  // As an acceptor.
  Ballot promised_ = 0, accepted_ = 0;
  std::optional<View> accepted_view_;
  // As a leader.
  Phase phase_ = Phase::kIdle;
  bool refused_ = false;
  Ballot ballot_ = 0;
  std::map<int, Promise> promises_;
  View proposed_;
  std::set<int> accepts_;
};

}  // namespace sordino::membership
