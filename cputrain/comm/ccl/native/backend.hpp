// The c10d backend "ccl": PyTorch's collectives on CPU tensors over oneCCL. Each method lays out buffers and hands one
// operation to the engine; what oneCCL lacks is composed from what it has, or refused by name.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "agreement.hpp"
#include "engine.hpp"
#include "kvs.hpp"
#include "ledger.hpp"
#include "messages.hpp"
#include "reductions.hpp"
#include "tensors.hpp"

namespace cputrain {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;
using Events = std::vector<ccl::event>;
using RedOpType = c10d::ReduceOp::RedOpType;

class CclBackend : public c10d::Backend {
 public:
  // `ranks`: the number of each rank of the group as people know it.
  CclBackend(
      c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<int> ranks, Milliseconds timeout, std::string name);
  ~CclBackend() override;

  const std::string getBackendName() const override { return "ccl"; }
  // torch 2.8 has no virtual functions of these two names.
  c10::intrusive_ptr<Options> getBackendOptions() { return options_; }
  void setTimeout(Milliseconds timeout) { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override { Engine::instance().abort("ccl: aborted"); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_rows, std::vector<int64_t>& input_rows,
      const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 private:
  WorkPtr submit(
      c10d::OpType type, const Tensors& described, Agreement agreement, Milliseconds timeout, Tensors outputs,
      std::function<Events()> launch, std::function<void()> finish);
  WorkPtr submit_message(
      c10d::OpType type, const Tensors& described, int peer, std::function<Poll()> start, std::function<void()> finish,
      std::function<int()> source = nullptr);

  void put_in_turn(
      std::function<Poll()>& start, std::function<void()>& finish, FirstCalls::Agreed agreed,
      const std::string& description) const;
  void start_those_in_turn() const;
  bool awaits_messages() const;

  WorkPtr reduce_all(c10d::OpType type, const Tensors& tensors, RedOpType op, Milliseconds timeout);
  WorkPtr reduce_bits(
      c10d::OpType type, const Tensors& tensors, RedOpType op, Milliseconds timeout, std::optional<int64_t> root = {});
  WorkPtr scatter_bits(
      c10d::OpType type, const Tensors& outputs, const Tensors& inputs, RedOpType op, Milliseconds timeout);
  WorkPtr reduce_sparse(const Tensor& tensor, RedOpType op, Milliseconds timeout);
  WorkPtr scatter_sums(
      c10d::OpType type, const Tensors& outputs, const Tensors& inputs, RedOpType op, Milliseconds timeout);
  WorkPtr gather_lists(
      c10d::OpType type, const std::vector<Tensors>& outputs, const Tensors& inputs, Milliseconds timeout);
  WorkPtr gather_into(c10d::OpType type, const Tensors& outputs, const Tensors& inputs, Milliseconds timeout);
  WorkPtr exchange(
      c10d::OpType type, Agreement agreement, const Tensors& outputs, const Tensors& inputs, Milliseconds timeout);
  WorkPtr receive(c10d::OpType type, const Tensor& tensor, int from, int tag);

  ccl::event gather_bytes(const Tensor& sent, const Tensor& received, const std::vector<size_t>& bytes) const;
  void check_pairs(const char* what, const Tensors& wholes, const Tensors& parts) const;
  Tensors only(const Tensor& tensor, int64_t rank) const;
  std::vector<size_t> parts(const Tensor& tensor, const std::vector<int64_t>& rows) const;

  c10::intrusive_ptr<c10d::Store> store_;  // a connection of its own: to wait here stops nobody else
  const std::string name_;
  std::string key_;  // the engine's
  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<StoreKvs> kvs_, message_kvs_;
  std::unique_ptr<ccl::communicator> comm_;
  // Where oneCCL has several threads, it gives collectives to them by turns, and messages to that of the next
  // collective: messages then need a communicator of their own.
  std::unique_ptr<ccl::communicator> message_comm_;
  std::shared_ptr<Inbox> inbox_;
  std::shared_ptr<Outbox> outbox_;
  Bf16Reduction bf16_reduction_;
  Bf16Reduction bf16_allreduce_;
  std::shared_ptr<Ledger> ledger_;
  std::unique_ptr<FirstCalls> first_calls_;  // of a group of several hosts
  // Its collectives that have still to start, in their order: the first one waits for the ranks' agreement.
  struct Turn;
  const std::shared_ptr<std::deque<std::shared_ptr<Turn>>> turns_;
  Progress* progress_ = nullptr;  // the engine's
  std::atomic<uint64_t> sequence_{0};  // of collectives; the order of the calls of oneCCL, whichever thread makes them
  std::atomic<uint64_t> messages_{0};
  std::thread::id caller_;  // of the last collective
  bool several_threads_ = false;  // call collectives
  std::atomic<uint64_t> monitored_{0};
};

}  // namespace cputrain
