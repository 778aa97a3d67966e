// One collective operation or message, from its submission to its result or error.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "clock.hpp"

namespace cputrain {

// A collective's group (its key in Engine::add_group) and number, and the digest and sum of balances of the group's
// agreements so far. A message has no group; `peers` are its possible sources or destinations.
struct Place {
  std::string group;
  uint64_t number = 0;
  uint64_t digest = 0;
  uint64_t balance = 0;
  std::vector<int> peers;
};

// Returns whether an operation has ended; called under the engine's lock until it returns true.
using Poll = std::function<bool()>;

// Ends when its poll returns true, or with an error.
class Operation : public c10d::Work {
 public:
  Operation(
      int rank,
      c10d::OpType type,
      const std::string& title,
      std::string description,
      Place place,
      std::chrono::milliseconds timeout,
      std::vector<at::Tensor> outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  // Throws at this timeout, after which the operation continues; at the group's timeout, all operations in flight fail.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;
  int sourceRank() const override;

  const std::string& description() const { return description_; }

 private:
  friend class Engine;

  // Runs finish_ after the last event, with the thread-local state (such as grad mode) of the submitting thread.
  void finish();
  void fail(const std::string& reason);

  const std::string description_;
  const Place place_;
  const Clock::time_point started_;
  const Clock::time_point deadline_;
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::optional<at::ThreadLocalState> caller_;
  // Set under the engine's lock.
  bool has_ended_ = false;  // ended_ has returned true; finish() may still have to run
  Poll ended_;
  std::function<Poll()> start_;  // owns the buffers that oneCCL reads
  std::function<void()> finish_;  // copies results to the caller's tensors; owns the buffers it copies from
  std::function<int()> source_;  // returns the sender of a received message
};

}  // namespace cputrain
