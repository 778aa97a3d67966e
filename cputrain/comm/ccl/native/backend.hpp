// The c10d backend "ccl": PyTorch's collectives on CPU tensors over oneCCL. Each method prepares buffers and submits
// one operation to the engine. Collectives that oneCCL lacks are composed of others, or refused with an error.
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
  // `ranks`: the global rank of each rank of the group.
  CclBackend(
      c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<int> ranks, Milliseconds timeout, std::string name);
  ~CclBackend() override;

  const std::string getBackendName() const override { return "ccl"; }
  // Without `override`, because torch 2.8 does not have these two virtual functions.
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

  c10::intrusive_ptr<c10d::Store> store_;  // a separate connection, so that waiting blocks no other user of the store
  const std::string name_;
  std::string key_;  // of the group in the engine
  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<StoreKvs> kvs_, message_kvs_;
  std::unique_ptr<ccl::communicator> comm_;
  // With several threads, oneCCL assigns collectives to them in turn, and messages to the next collective's thread, so
  // messages then need a separate communicator.
  std::unique_ptr<ccl::communicator> message_comm_;
  std::shared_ptr<Inbox> inbox_;
  std::shared_ptr<Outbox> outbox_;
  Bf16Reduction bf16_reduction_;
  Bf16Reduction bf16_allreduce_;
  std::shared_ptr<Ledger> ledger_;
  std::unique_ptr<FirstCalls> first_calls_;  // only for a group on several hosts
  // Deferred collectives in call order; the first one waits for the agreement of all ranks.
  struct Turn;
  const std::shared_ptr<std::deque<std::shared_ptr<Turn>>> turns_;
  Progress* progress_ = nullptr;  // owned by the engine
  std::atomic<uint64_t> sequence_{0};  // number of collectives called, in the order in which oneCCL is called
  std::atomic<uint64_t> messages_{0};
  std::thread::id caller_;  // thread of the last collective
  bool several_threads_ = false;  // whether more than one thread calls collectives
  std::atomic<uint64_t> monitored_{0};
};

}  // namespace cputrain
