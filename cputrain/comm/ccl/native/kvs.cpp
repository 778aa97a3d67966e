#include "kvs.hpp"

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include "engine.hpp"
#include "tensors.hpp"

namespace cputrain {

namespace {

constexpr auto kPause = std::chrono::milliseconds(1);  // between two reads of a key that another rank will set
constexpr auto kPausePerRank = std::chrono::microseconds(20);  // limits all ranks together to 50,000 reads a second
constexpr int kLongestPauses = 20;  // the longest pause as a multiple of the shortest
constexpr auto kAll = "/all";
constexpr size_t kMostKinds = 256;  // kinds per group; more are not checked, as ever-new sizes would fill the store
constexpr uint64_t kBalanceBits = (uint64_t{1} << 48) - 1;  // so that the sum over 32,767 ranks does not overflow

std::string missing_ranks(c10d::Store& store, const std::string& prefix, int size) {
  std::string missing;
  for (int rank = 0; rank < size; rank++) {
    if (!store.check({prefix + std::to_string(rank)})) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  return missing;
}

// Waits for a key; returns false at the timeout. Throws if the store is gone.
bool wait_for(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout) {
  try {
    store.wait({key}, std::max(timeout, std::chrono::milliseconds(1)));
    return true;
  } catch (const std::exception&) {
    return store.check({key});
  }
}

}  // namespace

void store_is_gone(const std::string& failed, const std::exception& error) {
  const auto text = message_of(error);
  refuse(
      "ccl: ", failed, ": the job's store is gone, as the process that served it (rank 0's, or torchrun's) or its host "
      "has ended (", text.substr(0, std::min(text.find('\n'), size_t{150})), ")");
}

int64_t gather_ranks(
    c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout, bool has_feature,
    const std::string& group) {
  std::string missing;
  try {
    store.add("feature", has_feature ? 1 : 0);
    store.set("here/" + std::to_string(rank), std::string("here"));
    if (store.add("count", 1) == size) {
      store.set("all", std::string("here"));
    }
    if (wait_for(store, "all", timeout)) {
      return store.add("feature", 0);
    }
    missing = missing_ranks(store, "here/", size);
  } catch (const std::exception& error) {
    store_is_gone(group + " cannot be created", error);
  }
  refuse(
      "ccl: Timed out after ", timeout.count() / 1000.0, " s while ", group,
      " was created: not all of its ranks joined (missing: ", missing, ")");
}

StoreKvs::StoreKvs(c10::intrusive_ptr<c10d::Store> store, std::string prefix, std::chrono::milliseconds timeout)
    : store_(std::move(store)), prefix_(std::move(prefix)), timeout_(timeout), deadline_(awake_now() + timeout) {}

ccl::vector_class<char> StoreKvs::get(const ccl::string_class& key) {
  if (left_) {
    return {};
  }
  try {
    CPUTRAIN_REQUIRE(
        awake_now() < deadline_, "no answer of another rank for ", timeout_.count() / 1000.0, " s");
    const auto name = prefix_ + std::string(key.c_str());
    if (!store_->check({name})) {
      std::this_thread::sleep_for(kPause);
      return {};
    }
    const auto value = store_->get(name);
    return {value.begin(), value.end()};
  } catch (...) {
    leave();
    throw;
  }
}

void StoreKvs::set(const ccl::string_class& key, const ccl::vector_class<char>& data) {
  if (left_) {
    return;
  }
  try {
    store_->set(prefix_ + std::string(key.c_str()), std::vector<uint8_t>(data.begin(), data.end()));
  } catch (...) {
    leave();
    if (std::uncaught_exceptions() == 0) {
      throw;
    }
  }
}

struct FirstCalls::Call {
  const std::string key;
  const std::optional<uint64_t> balance;
  std::atomic<bool> agreed{false};
  bool is_published = false;
};

// Shared with the thread that polls the store; it runs, with a separate connection, while there are calls.
struct FirstCalls::Shared {
  const c10::intrusive_ptr<c10d::Store> store;
  const int size;
  std::mutex mutex;
  std::vector<std::shared_ptr<Call>> calls;
  bool runs = false;
  std::atomic<bool> left{false};  // the group was destroyed
};

FirstCalls::FirstCalls(c10::intrusive_ptr<c10d::Store> store, int size)
    : shared_(new Shared{.store = std::move(store), .size = size}) {}

FirstCalls::~FirstCalls() {
  shared_->left = true;  // without the lock, which may be locked in a forked child
}

FirstCalls::Agreed FirstCalls::compare(
    uint64_t kind, uint64_t number, uint64_t digest, std::optional<uint64_t> balance) {
  if (kinds_.size() == kMostKinds || !kinds_.insert(kind).second) {
    return {};
  }
  const std::lock_guard lock(shared_->mutex);
  const std::shared_ptr<Call> call(new Call{.key = c10::str("call", number, "/", digest), .balance = balance});
  shared_->calls.push_back(call);
  if (!shared_->runs) {
    std::thread([shared = shared_] { run(shared); }).detach();
    shared_->runs = true;
  }
  return {call, &call->agreed};
}

void FirstCalls::run(const std::shared_ptr<Shared>& shared) {
  pthread_setname_np(pthread_self(), "cputrain-calls");
  std::unique_lock lock(shared->mutex, std::defer_lock);
  try {
    const auto store = shared->store->clone();  // without the lock, so that no caller waits for the connection
    // Many ranks poll the same store, which must keep time for their heartbeats.
    const auto shortest = std::max<std::chrono::microseconds>(kPause, shared->size * kPausePerRank);
    const auto longest = kLongestPauses * shortest;
    auto pause = shortest;
    lock.lock();
    while (!shared->calls.empty() && !shared->left && Engine::instance().disagreement().empty()) {
      const auto asked = shared->calls;
      lock.unlock();
      bool agreed = true;  // in call order: no call is agreed before the calls preceding it
      for (const auto& call : asked) {
        publish(*store, *call, shared->size);
        agreed = agreed && store->check({call->key + kAll});
        call->agreed = agreed;
      }
      if (!asked.front()->agreed) {
        std::this_thread::sleep_for(pause);
      }
      lock.lock();
      const auto ended = std::erase_if(shared->calls, [](const auto& call) { return call->agreed.load(); });
      pause = ended > 0 || shared->calls.size() > asked.size() ? shortest : std::min(2 * pause, longest);
    }
  } catch (const std::exception&) {
    // The store is gone: the watchdog ends this rank if it waits.
    if (!lock.owns_lock()) {
      lock.lock();
    }
  }
  shared->runs = false;
}

// All ranks have called the same collectives up to a number if their digests are equal and their balances sum to 0.
void FirstCalls::publish(c10d::Store& store, Call& call, int size) {
  if (std::exchange(call.is_published, true)) {
    return;
  }
  const auto balances = call.key + "/balance";
  if (call.balance) {
    store.add(balances, static_cast<int64_t>(*call.balance & kBalanceBits));
  }
  if (store.add(call.key, 1) == size && (!call.balance || (store.add(balances, 0) & kBalanceBits) == 0)) {
    store.set(call.key + kAll, std::string("called"));
  }
}

void monitored_barrier(
    c10d::Store& store, int rank, int size, uint64_t number, std::chrono::milliseconds timeout, bool wait_all) try {
  const auto prefix_of = [](uint64_t count) { return "monitored" + std::to_string(count) + "/"; };
  const auto prefix = prefix_of(number);
  const auto deadline = Clock::now() + timeout;
  const auto left = [&] { return std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()); };
  store.set(prefix + std::to_string(rank), std::string("here"));
  if (rank > 0) {
    const bool decided = wait_for(store, prefix + "outcome", 2 * timeout);  // twice, as rank 0 itself waits for others
    CPUTRAIN_REQUIRE(decided, "ccl: Rank 0 failed to pass monitoredBarrier in ", 2 * timeout.count(), " ms");
    const auto problem = store.get_to_str(prefix + "outcome");
    CPUTRAIN_REQUIRE(problem == "all", problem);
    return;
  }
  std::string missing;
  for (int other = 1; other < size && (missing.empty() || wait_all); other++) {
    if (!wait_for(store, prefix + std::to_string(other), left())) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(other);
    }
  }
  if (missing.empty() && number > 1) {  // all ranks have left the previous barrier
    const auto before = prefix_of(number - 1);
    store.deleteKey(before + "outcome");
    for (int other = 0; other < size; other++) {
      store.deleteKey(before + std::to_string(other));
    }
  }
  const auto problem = c10::str(
      "ccl: ", missing.find(',') == std::string::npos ? "Rank " : "Ranks ", missing, " failed to pass monitoredBarrier in ",
      timeout.count(), " ms");
  store.set(prefix + "outcome", missing.empty() ? std::string("all") : problem);
  CPUTRAIN_REQUIRE(missing.empty(), problem);
} catch (const c10::DistError& error) {
  store_is_gone("monitored_barrier failed", error);
}

}  // namespace cputrain
