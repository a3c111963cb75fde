// Averaging of one worker's values with one other's, while both compute: AD-PSGD.
//
// Both send each other a copy of their values and add half the difference of the two copies to what they have by then.
// So both sides take the same mean, the sum over all workers stays the same, and what a step has changed meanwhile is
// not lost. Both say first that they are ready, so that nothing is under way to one who has left the averaging.
// Nobody holds anything while it waits: the lock on the values is taken for a step of the optimizer, or for
// one pass over them, and who moves messages tries again rather than wait for it.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "arena/layout.h"
#include "services/mailbox.h"
#include "services/service.h"
#include "services/service_context.h"

namespace sordino {

class PairAveraging : public Service {
 public:
  // `values` hold a layout's worth of bytes and outlive the service. `mailbox` gets kDone, with the number, when an
  // averaging is over (text empty) or came to nothing (text says why).
  PairAveraging(ServiceContext& context, int number, std::shared_ptr<const Layout> layout, std::byte* values,
                std::shared_ptr<Mailbox> mailbox);

  // What transfers may still touch stays for ever.
  ~PairAveraging() override;

  // Averages with `peer`, which is to say the same number to its own. One at a time. Throws what end() was given.
  void begin(int peer, std::uint64_t number);
  // Leaves the one that is under way; nothing changes here.
  void cancel();
  // Keeps averagings from changing the values, until unlock(). lock() may wait for one pass over them.
  void lock() { values_mutex_.lock(); }
  void unlock();

  void receive(int from, Reader& reader) override;
  bool advance(Time now) override;
  void lost(int rank) override;
  void end(std::exception_ptr why) override;
  bool settled() const override { return abandoned_.empty(); }

 private:
  struct Memory {
    std::unique_ptr<std::byte[]> out, in;
  };
  struct Averaging {
    int peer;
    std::uint64_t number;
    Time since{};
    Memory memory{};
    bool told = false;          // the peer, that this side is ready
    bool copied = false;        // both are ready, and what is sent is fixed
    bool deserted = false;      // by the peer
    std::uint64_t changes = 0;  // of the values, when they were copied
    std::unique_ptr<Transfer> sending{}, receiving{};
  };
  // What a peer has said of its last averaging with this rank: that it is ready, and then where to send to. It goes on
  // to the next as soon as it has what it needs of this one, so nothing here is of use once this side has sent.
  struct Invitation {
    std::uint64_t number = 0;
    std::optional<Tag> tag{};
  };

  std::unique_lock<std::mutex> try_values();
  bool join(Averaging& averaging, Time now);
  bool start(Averaging& averaging, Time now);
  void send(Averaging& averaging, Tag tag);
  static bool exchanged(Averaging& averaging);
  bool apply(Averaging& averaging);
  void leave(const std::string& why);
  void push_done(const Averaging& averaging, const std::string& why);

  ServiceContext& context_;
  const int number_;
  const std::shared_ptr<const Layout> layout_;
  std::byte* const values_;
  const std::shared_ptr<Mailbox> mailbox_;

  std::mutex values_mutex_;           // held while the values change
  std::uint64_t changes_ = 0;         // guarded by it
  std::atomic<bool> refused_{false};  // the thread that polls has found them held

  std::mutex mutex_;  // guards what callers leave for the thread that polls
  std::unique_ptr<Averaging> next_;
  bool cancelled_ = false;
  std::exception_ptr ended_;

  // Of the thread that polls.
  std::unique_ptr<Averaging> current_;
  std::map<int, Invitation> invitations_;
  std::set<int> closed_;            // peers that are gone, or have closed theirs
  std::list<Averaging> abandoned_;  // whose memory transfers may still touch
  Memory spare_;
};

}  // namespace sordino
