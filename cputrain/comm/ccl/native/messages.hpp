// Point-to-point messages. oneCCL delivers those of two ranks in the order in which they were sent, knows no tags and
// needs each size beforehand: a header with tag and size precedes every message, and receives are matched here.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "operation.hpp"
#include "tensors.hpp"

namespace cputrain {

constexpr int kAnySource = -1;

// What precedes a message on its way.
struct Header {
  int64_t tag;
  int64_t bytes;
};

// A receive that waits for its message or has got it.
struct Receive {
  int source;  // kAnySource, until a message from any rank has matched
  int64_t tag;
  Tensor buffer;  // contiguous
  bool ended = false;
  int64_t found_bytes = 0;  // of the message: where they are not the buffer's, the buffer is left alone
};

// The messages that arrive over a communicator. All is called under the engine's lock.
class Inbox {
 public:
  Inbox(ccl::communicator& comm, int size);

  void expect(const std::shared_ptr<Receive>& receive);

  // Takes up what has arrived and asks for what is wanted next.
  void progress();

  // Whether oneCCL still waits for a message: a receive from any source leaves it waiting for headers that nobody may
  // send. Neither this nor the communicator can then be destroyed.
  bool awaits() const;

 private:
  enum class State { idle, header, known, data };  // known: the header has arrived, its data was not asked for

  // A message that arrived before a receive for it.
  struct Message {
    int64_t tag;
    Tensor data;
  };

  // What arrives from one rank.
  struct Channel {
    State state = State::idle;
    std::unique_ptr<Header> header;
    std::optional<ccl::event> event;
    Tensor data;
    std::shared_ptr<Receive> receive;  // whose data is on its way; none: kept for a later receive
    std::deque<Message> kept;
  };

  void progress(int source);
  std::shared_ptr<Receive> match(int source, int64_t tag);
  bool wanted(int source) const;
  void ask_for_data(int source);
  void open(Channel& channel, void* at, int64_t bytes, int source);
  static void deliver(Receive& receive, const Tensor& data);
  static bool take_kept(Channel& channel, Receive& receive);

  ccl::communicator& comm_;
  const int rank_;
  std::vector<Channel> channels_;
  std::list<std::shared_ptr<Receive>> waiting_;  // in the order of the calls
};

// A message that is to be sent, or on its way.
struct Send {
  Header header;
  Tensor data;  // contiguous
  enum class State { queued, header, data, ended } state = State::queued;
};

// The messages that leave over a communicator. All is called under the engine's lock. oneCCL starts sends in the order
// in which it finds them while it works, not in that of the calls: to each rank, one is on its way at a time.
class Outbox {
 public:
  Outbox(ccl::communicator& comm, int size) : comm_(comm), channels_(size) {}

  void post(const std::shared_ptr<Send>& message, int destination);
  void progress(int destination);

 private:
  struct Channel {
    std::deque<std::shared_ptr<Send>> queue;
    std::optional<ccl::event> event;
  };

  ccl::communicator& comm_;
  std::vector<Channel> channels_;
};

}  // namespace cputrain
