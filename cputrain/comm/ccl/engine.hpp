// Operations in flight: who submitted them, who drives them on, how they end. oneCCL is entered under one lock only.
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

// One collective as its caller sees it. It ends when all its oneCCL events have, or with an error.
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
  // Set and cleared under the engine's lock alone.
  Events events_;
  std::function<Events()> launch_;  // holds the buffers that oneCCL reads
  std::function<void()> finish_;  // copies results to where the caller wants them; holds the buffers it copies from
};

// What this process waits for: nothing where `in` is empty. `until` is when it should have ended, one way or another.
struct Waiting {
  std::string in;
  uint64_t sequence = 0;
  Clock::time_point until;
};

// Drives all operations of this process. A waiting caller drives them itself; what nobody waits for, a thread of the
// engine's does, resting longer and longer while nothing ends.
class Engine {
 public:
  static Engine& instance();

  // Submits one operation: `launch` calls oneCCL and returns its events; `finish` runs once, after the last of them.
  void submit(
      const c10::intrusive_ptr<Operation>& operation,
      std::function<Events()> launch,
      std::function<void()> finish);

  // Looks once at all operations in flight; false where another thread is just doing so.
  bool drive();

  // Fails all operations in flight and all to come: what oneCCL still does is of no use then.
  void abort(const std::string& reason);

  // What the message of a timeout adds: who has not joined.
  void note(std::string absent);

  // Calls into oneCCL that are no operations: making communicators. Those may take as long as a rank is late.
  std::unique_lock<std::mutex> enter();

  // The oldest operation in flight, or what else this process waits for. Never waits itself.
  Waiting waits_in();
  void tell(Waiting waiting);
  void tell_oldest();  // with the engine entered

  // Whether oneCCL has nothing to do, and may still be called.
  bool idle();

  // To be called once oneCCL has set up all that it takes down at the process's end: until then nobody may be inside.
  void mind_exit();

 private:
  friend class Operation;

  Engine();
  void run();
  void time_out(const Operation& operation);
  size_t time_out_late();
  void leave(int status);

  std::mutex mutex_;
  std::condition_variable work_;
  std::list<c10::intrusive_ptr<Operation>> pending_;
  std::string aborted_;
  bool left_ = false;
  std::mutex told_mutex_;  // held for a moment only, and while mutex_ may be held
  std::string absent_;
  Waiting waiting_for_;
  std::atomic<int> waiting_{0};  // callers that drive by themselves
};

}  // namespace cputrain
