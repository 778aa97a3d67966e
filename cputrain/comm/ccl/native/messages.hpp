// Point-to-point messages. oneCCL delivers messages between two ranks in order, has no tags and needs to know each size
// in advance. So a header with tag and size precedes every message, and messages are matched to receives here.
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

// Header sent before a message.
struct Header {
  int64_t tag;
  int64_t bytes;
};

// A receive, waiting for its message or completed.
struct Receive {
  int source;  // kAnySource, until a message from any rank has matched
  int64_t tag;
  Tensor buffer;  // contiguous
  bool ended = false;
  int64_t found_bytes = 0;  // size of the message; if it is not the buffer's size, the buffer is unchanged
};

// Incoming messages of a communicator. All methods need the engine's lock.
class Inbox {
 public:
  Inbox(ccl::communicator& comm, int size);

  void expect(const std::shared_ptr<Receive>& receive);

  // Processes arrived messages and starts the next receives.
  void progress();

  // Returns whether oneCCL still waits for a message, as after a receive from any source, which waits for headers of
  // all ranks. Neither this object nor the communicator can then be destroyed.
  bool awaits() const;

 private:
  enum class State { idle, header, known, data };  // known: the header has arrived, the data was not requested yet

  // A message that arrived before a receive for it.
  struct Message {
    int64_t tag;
    Tensor data;
  };

  // Incoming messages from one rank.
  struct Channel {
    State state = State::idle;
    std::unique_ptr<Header> header;
    std::optional<ccl::event> event;
    Tensor data;
    std::shared_ptr<Receive> receive;  // receive of the data in flight; null: the data is kept for a later receive
    std::deque<Message> kept;
  };

  void progress(int source);
  std::shared_ptr<Receive> match(int source, int64_t tag);
  bool is_expected(int source) const;
  void ask_for_data(int source);
  void open(Channel& channel, void* at, int64_t bytes, int source);
  static void deliver(Receive& receive, const Tensor& data);
  static bool take_kept(Channel& channel, Receive& receive);

  ccl::communicator& comm_;
  const int rank_;
  std::vector<Channel> channels_;
  std::list<std::shared_ptr<Receive>> waiting_;  // in call order
};

// A message to send, or in flight.
struct Send {
  Header header;
  Tensor data;  // contiguous
  enum class State { queued, header, data, ended } state = State::queued;
};

// Outgoing messages of a communicator. All methods need the engine's lock. oneCCL does not start sends in call order,
// so only one message to each rank is in flight at a time.
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
