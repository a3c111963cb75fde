// Consensus of an epoch's members on the next epoch: Paxos for a single decision (Lamport, Paxos Made Simple, 2001).
// The acceptors are the members that are not known to be dead. A leader decides only after more than half of them have
// accepted its proposal. So two parts of a partitioned network never both continue. A pure state machine without clock
// or network: it takes facts and messages, and sends messages through `send`. The leader of a rank is the first one
// that it does not know as dead, silent or accused. Phases of the leader:
//
//   phase        condition for the next phase                         sends to all   next phase
//   kIdle        begun, and this rank leads                           kPrepare       kPreparing
//   kPreparing   more than half, and all but silent ranks, promised   kAccept        kProposing
//   kProposing   more than half have accepted                         kDecided       decided()
//
// After a refusal, retry() starts again from kIdle with a higher ballot. The proposal is a view that a promise reports
// as accepted (of several, the highest ballot's). If there is none, it is all ranks that have promised, except ranks at
// fault (members_without_fault). The leader may leave itself out.
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

using Waits = std::map<int, std::set<int>>;  // by rank, the ranks that it waits for

// Returns the ranks, in ascending order, that can continue together. `accused`: by rank, how many ranks accuse it.
// `waits`: long waits. An accused rank may be late only because it waits for another rank, which then counts as
// accused, too. The rank at the end of such a chain, which waits for no other, is at fault. Ranks that wait for it are
// excused, and so are ranks that wait for a rank outside of `ranks`. In a cycle of waits, the most accused rank is at
// fault (of several, the highest one). At least one rank stays.
std::vector<int> members_without_fault(const std::vector<int>& ranks, const std::map<int, int>& accused,
                                       const Waits& waits);

class Consensus {
 public:
  using Send = std::function<void(int to, const Bytes& message)>;

  // `self` and all other ranks have their numbers of epoch 0.
  Consensus(View from, int self, Send send);

  // Note facts about a rank. Dead (bury): it has certainly ended, or has said that it leaves. Silent: it does not
  // answer. Accused: it answers, but has missed the deadline of an operation in which this rank waits. A rank can
  // accuse itself if it coordinates an operation that it has not reached.
  void bury(int rank, const std::string& cause);
  void silence(int rank, const std::string& cause);
  void accuse(int rank, const std::string& cause);
  // Notes a message of `rank`, which is therefore not silent.
  void hear(int rank);
  // Sets the long waits that this rank knows of now: its own, and waits in operations that it coordinates.
  void set_waits(Waits waits) { waits_ = std::move(waits); }
  // Notes that this rank has used only tags below `next`.
  void count_tags(int next) { next_tag_ = std::max(next_tag_, next); }

  // Begins to agree on the next epoch. A rank that receives a message of the consensus begins, too.
  void begin();
  bool begun() const { return begun_; }
  void receive(int from, Reader& message);
  // Call this regularly. A leader starts a new ballot if it was refused; else it repeats its message to ranks that have
  // not answered. Any other rank repeats its facts to the leader, in case that one has not begun.
  void retry();

  const std::optional<View>& decided() const { return decided_; }
  // True while this rank hears from more than half of the ranks that have not certainly died.
  bool has_quorum() const;
  const View& from() const { return from_; }
  bool is_silent(int rank) const { return silent_.contains(rank); }
  // Ranks that this rank knows as dead, silent or accused, with the causes.
  std::map<int, std::string> blamed() const;
  // Message that tells another rank the decision.
  static Bytes verdict(const View& view);
  static bool is_verdict(Reader message) { return message.one_of(kLastStep) == Step::kDecided; }

 private:
  enum class Step : std::uint8_t { kFacts, kPrepare, kPromise, kRefuse, kAccept, kAccepted, kDecided };
  static constexpr Step kLastStep = Step::kDecided;
  enum class Phase { kIdle, kPreparing, kProposing };
  using Ballot = std::uint64_t;
  struct Promise {
    std::vector<int> accused;
    Waits waits;
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
  bool comes_ = true;  // false: this rank has accused itself
  Waits waits_;
  int next_tag_ = 0;
  bool begun_ = false;
  std::optional<View> decided_;
  // State as an acceptor.
  Ballot promised_ = 0, accepted_ = 0;
  std::optional<View> accepted_view_;
  // State as a leader.
  Phase phase_ = Phase::kIdle;
  bool refused_ = false;
  Ballot ballot_ = 0;
  std::map<int, Promise> promises_;
  View proposed_;
  std::set<int> accepts_;
};

}  // namespace sordino::membership
