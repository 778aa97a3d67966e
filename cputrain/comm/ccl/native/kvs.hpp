// The job's c10d store as the place where the ranks of a communicator meet and exchange addresses.
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

// Raises the error of a store that no longer answers; `failed` says what cannot go on, as describe_gone in store.py.
[[noreturn]] void store_is_gone(const std::string& failed, const std::exception& error);

// Waits until all ranks of a group have come here, without any lock; how many of them have a feature. Fails at the
// timeout with the names of those that are missing, and where the store is gone.
int64_t gather_ranks(
    c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout, bool has_feature,
    const std::string& group);

// oneCCL's exchange of addresses, once all ranks are there.
class StoreKvs : public ccl::kvs_interface {
 public:
  StoreKvs(c10::intrusive_ptr<c10d::Store> store, std::string prefix, std::chrono::milliseconds timeout);

  // Returns nothing for a key that is not set yet: oneCCL asks again.
  ccl::vector_class<char> get(const ccl::string_class& key) override;

  void set(const ccl::string_class& key, const ccl::vector_class<char>& data) override;

  // A communicator clears its entries when it is destroyed, in destructors that must not throw; the store may be closed
  // by then.
  void leave() { left_ = true; }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_;
  std::atomic<bool> left_{false};
};

// The first collective of each kind of a group whose ranks do not all share a Ledger: they learn over the store whether all
// of them call it, and oneCCL has none of its data before. Later ones of a kind cost nothing.
class FirstCalls {
 public:
  using Agreed = std::shared_ptr<const std::atomic<bool>>;

  FirstCalls(c10::intrusive_ptr<c10d::Store> store, int size);
  ~FirstCalls();
  FirstCalls(const FirstCalls&) = delete;
  FirstCalls& operator=(const FirstCalls&) = delete;

  // What becomes true once all ranks have called the collective of this number; nothing for one of a kind that was called
  // before. `digest` and `balance` are the group's up to this number. Never blocks.
  Agreed compare(uint64_t kind, uint64_t number, uint64_t digest, std::optional<uint64_t> balance);

 private:
  struct Call;
  struct Shared;
  static void run(const std::shared_ptr<Shared>& shared);
  static void publish(c10d::Store& store, Call& call, int size);

  const std::shared_ptr<Shared> shared_;
  std::unordered_set<uint64_t> kinds_;
};

// All ranks wait for all others: rank 0 finds who is missing at the timeout and tells the others. `number` counts a
// group's barriers; one that all ranks reach takes the keys of the one before out of the store.
void monitored_barrier(
    c10d::Store& store, int rank, int size, uint64_t number, std::chrono::milliseconds timeout, bool wait_all);

}  // namespace cputrain
