// Collective operations in flight: their submission, progress and end. One lock guards every call into oneCCL.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <oneapi/ccl.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace cputrain {

using Clock = std::chrono::steady_clock;
using Events = std::vector<ccl::event>;

// One collective operation. It ends when all its oneCCL events have ended, or with an error.
class Operation : public c10d::Work {
 public:
  Operation(
      int rank,
      c10d::OpType type,
      const std::string& title,
      std::string description,
      uint64_t sequence,
      std::chrono::milliseconds timeout,
      std::vector<at::Tensor> outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

  const std::string& description() const { return description_; }

 private:
  friend class Engine;

  const std::string description_;
  const uint64_t sequence_;
  const Clock::time_point started_;
  const Clock::time_point deadline_;
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  // Set and cleared under the engine's lock.
  Events events_;
  std::function<Events()> launch_;  // owns the buffers that oneCCL reads
  std::function<void()> finish_;  // copies results to the caller's tensors; owns the buffers it copies from
};

// The collective that this process waits in, "" for none, and the end of its timeout.
struct CurrentCollective {
  std::string collective;
  uint64_t sequence = 0;
  Clock::time_point deadline;
};

// Drives all operations of this process. A waiting caller drives them itself; the engine's thread drives those that no
// caller waits for, and sleeps longer and longer while none ends.
class Engine {
 public:
  static Engine& instance();

  // Submits an operation: `launch` calls oneCCL and returns its events; `finish` runs once, after the last event.
  void submit(
      const c10::intrusive_ptr<Operation>& operation,
      std::function<Events()> launch,
      std::function<void()> finish);

  // Polls all operations in flight once; false where another thread does so at the moment.
  bool drive();

  // Fails all operations in flight and all later ones.
  void abort(const std::string& reason);

  // Sets the text about ranks that have not joined, which the message of a timeout includes.
  void set_absent_ranks(std::string absent);

  // Locks oneCCL for calls that are no operations: creating and destroying communicators. Those wait for late ranks.
  std::unique_lock<std::mutex> enter();

  // The oldest operation in flight, or the creation or destruction of a communicator. Never blocks.
  CurrentCollective current();
  void publish(CurrentCollective current);
  void publish_oldest();  // needs the engine's lock

  // Whether oneCCL has no operation in flight and may still be called.
  bool idle();

  // Registers the engine's exit handler. Must be called after oneCCL has registered its own, so that it runs first.
  void register_exit_handler();

 private:
  friend class Operation;

  Engine();
  void run();
  void time_out(const Operation& operation);
  size_t time_out_late();
  void on_process_exit(int status);

  std::mutex mutex_;
  std::condition_variable work_;
  std::list<c10::intrusive_ptr<Operation>> pending_;
  std::string aborted_;
  bool exiting_ = false;
  std::mutex published_mutex_;  // held briefly; may be locked while mutex_ is
  std::string absent_;
  CurrentCollective published_;
  std::atomic<int> waiting_callers_{0};  // these drive operations themselves
};

}  // namespace cputrain
