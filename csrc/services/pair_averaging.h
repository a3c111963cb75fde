// Averaging of the values of two workers while both compute (AD-PSGD).
//
// Each sends a copy of its values to the other, and then adds half the difference of the two copies to its current
// values. So both move to the same mean, the sum over all workers stays the same, and changes by a step in the meantime
// are not lost. Each first announces that it is ready, so that no values are sent to a worker that has left the
// averaging. No worker holds a lock while it waits for another. The lock on the values is held for a step of the
// optimizer, or for one pass over the values. The polling thread does not wait for it, but tries again.
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
  // `values` has layout->bytes() bytes, and must outlive the service. `mailbox` gets kDone with the number of each
  // averaging that succeeds (empty text) or fails (the text is the reason).
  PairAveraging(ServiceContext& context, int number, std::shared_ptr<const Layout> layout, std::byte* values,
                std::shared_ptr<Mailbox> mailbox);

  // Leaks memory that transfers may still use.
  ~PairAveraging() override;

  // Requests an averaging with `peer`, which must pass the same number to its own begin(). Throws UsageError if an
  // earlier request has not begun yet, and after end() the error given to it.
  void begin(int peer, std::uint64_t number);
  // Drops a request, and leaves the current averaging unless it has ended, without a change of the values here.
  void cancel();
  // Prevents averagings from changing the values until unlock(). lock() may wait for one pass over the values.
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
    bool told = false;          // this side has told the peer that it is ready
    bool copied = false;        // both sides are ready, and the values to send are fixed
    bool deserted = false;      // the peer has left
    Tag tag = 0;                // of the peer's values; valid once copied
    std::uint64_t changes = 0;  // changes_ when the values were copied
    std::unique_ptr<Transfer> sending{}, receiving{};
  };
  // A peer's latest message about an averaging with this rank: that it is ready, and later the tag to send to. The peer
  // begins its next averaging as soon as it has all data of this one. So nothing here is valid once this side has sent.
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

  std::mutex values_mutex_;           // held during changes of the values
  std::uint64_t changes_ = 0;         // number of changes of the values; guarded by values_mutex_
  std::atomic<bool> refused_{false};  // the polling thread found values_mutex_ locked, and waits for unlock()

  std::mutex mutex_;  // guards the next three members, which callers share with the polling thread
  std::unique_ptr<Averaging> next_;
  bool cancelled_ = false;
  std::exception_ptr ended_;

  // Used by the polling thread only.
  std::unique_ptr<Averaging> current_;
  std::map<int, Invitation> invitations_;
  std::set<int> closed_;            // peers that are gone, or have closed their service
  std::list<Averaging> abandoned_;  // transfers may still use their memory
  Memory spare_;
};

}  // namespace sordino
