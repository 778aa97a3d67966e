// Uses of the job's c10d store: exchange of addresses for a communicator, agreement on first calls, monitored barrier.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>

#include <oneapi/ccl.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "clock.hpp"

namespace cputrain {

// Throws the error of a store that no longer answers, as describe_gone in store.py; `failed` says what has failed.
[[noreturn]] void store_is_gone(const std::string& failed, const std::exception& error);

// Waits, without a lock, until all ranks of a group have called this; returns how many of them have a feature. Throws
// at the timeout, with the missing ranks, and if the store is gone.
int64_t gather_ranks(
    c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout, bool has_feature,
    const std::string& group);

// oneCCL's exchange of addresses over the store, after all ranks have joined.
class StoreKvs : public ccl::kvs_interface {
 public:
  StoreKvs(c10::intrusive_ptr<c10d::Store> store, std::string prefix, std::chrono::milliseconds timeout);

  // Returns an empty value for a key that is not set yet; oneCCL then asks again.
  ccl::vector_class<char> get(const ccl::string_class& key) override;

  void set(const ccl::string_class& key, const ccl::vector_class<char>& data) override;

  // Ignores later calls: a communicator clears its entries in destructors that must not throw, and the store may be
  // closed by then.
  void leave() { left_ = true; }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_;
  std::atomic<bool> left_{false};
};

// For a group whose ranks do not all share a Ledger: checks over the store that all ranks call the first collective of
// each kind, before oneCCL gets its data. Later collectives of a kind are not checked and cost nothing.
class FirstCalls {
 public:
  using Agreed = std::shared_ptr<const std::atomic<bool>>;

  FirstCalls(c10::intrusive_ptr<c10d::Store> store, int size);
  ~FirstCalls();
  FirstCalls(const FirstCalls&) = delete;
  FirstCalls& operator=(const FirstCalls&) = delete;

  // Returns a flag that becomes true when all ranks have called the collective of this number, or null if its kind was
  // called before. `digest` and `balance` are the group's up to this number. Never blocks.
  Agreed compare(uint64_t kind, uint64_t number, uint64_t digest, std::optional<uint64_t> balance);

 private:
  struct Call;
  struct Shared;
  static void run(const std::shared_ptr<Shared>& shared);
  static void publish(c10d::Store& store, Call& call, int size);

  const std::shared_ptr<Shared> shared_;
  std::unordered_set<uint64_t> kinds_;
};

// Waits for all ranks; at the timeout, rank 0 determines the missing ranks and reports them to the others. `number`
// counts a group's barriers; a completed barrier deletes the keys of the previous one from the store.
void monitored_barrier(
    c10d::Store& store, int rank, int size, uint64_t number, std::chrono::milliseconds timeout, bool wait_all);

}  // namespace cputrain
