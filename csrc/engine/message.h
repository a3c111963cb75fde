// Messages between two ranks: the description that travels with a message, and a call of this rank that sends or
// receives one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/awake_clock.h"
#include "base/dtype.h"
#include "base/time.h"
#include "base/wire.h"
#include "collectives/request.h"
#include "transport/location.h"

namespace sordino {

// Description of a message, which travels before its payload.
struct Envelope {
  enum class Form : std::uint8_t {
    kWhole,      // the payload is the data
    kAnnounced,  // the payload is the Location of the data; the sender keeps the data until the receiver has them
  };
  static constexpr Form kLastForm = Form::kAnnounced;

  std::uint64_t number;  // counts the sender's messages to this receiver, from 1
  std::int64_t tag;
  std::uint64_t bytes;  // of the data
  std::int32_t set;     // process set
  DType dtype;
  Form form;
  std::uint16_t unused;

  std::size_t payload() const { return form == Form::kWhole ? bytes : sizeof(Location); }
};
static_assert(sizeof(Envelope) == 32);

// An unfinished call that sends or receives a message. The caller's thread creates it; from then on only the polling
// thread uses it.
struct Posting {
  static constexpr int kAnySource = -1;

  bool sends = false;
  int set = 0;
  int peer = kAnySource;  // world rank
  std::int64_t tag = 0;
  DType dtype = DType::kUInt8;
  std::byte* data = nullptr;  // read or written until the handle is done
  std::size_t bytes = 0;
  std::vector<int> sources;  // for kAnySource: the ranks that may send
  Handle handle;

  AwakeTime since{};         // start of its deadline
  Time begun{};              // start of its span; set only while a trace is written
  bool warned = false;       // a stall has been reported
  std::uint64_t number = 0;  // Envelope::number, once the envelope has been sent

  // "send to rank 3 with tag 7 on process set 1"
  std::string text() const {
    const std::string who = peer == kAnySource ? "any rank" : "rank " + std::to_string(peer);
    return (sends ? "send to " : "recv from ") + who + " with tag " + std::to_string(tag) +
           (set == 0 ? "" : " on process set " + std::to_string(set));
  }
};

// A message, from another rank or from this one, that has arrived or is arriving.
struct Arrival {
  int from;
  Envelope envelope;
  std::shared_ptr<Posting> taker = {};  // the receive that gets it; null while it waits in MessageQueues
  Bytes data = {};                      // the payload, unless it goes directly to the taker's memory
  std::byte* into = nullptr;            // memory of the payload
  std::size_t arrived = 0;              // bytes of the payload that have arrived
  std::shared_ptr<Posting> own = {};    // the send of a large message of this rank to itself; it keeps the data

  bool complete() const { return own || arrived == envelope.payload(); }
};

}  // namespace sordino
