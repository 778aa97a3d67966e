#include "kvs.hpp"

#include <thread>

#include "tensors.hpp"

namespace cputrain {

namespace {

constexpr auto kPause = std::chrono::milliseconds(1);  // between two looks at a key that another rank is about to set

std::string missing_ranks(c10d::Store& store, const std::string& prefix, int size) {
  std::string missing;
  for (int rank = 0; rank < size; rank++) {
    if (!store.check({prefix + std::to_string(rank)})) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  return missing;
}

// Waits for a key; false at the timeout. Raises where the store is gone.
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
      "ccl: ", failed, ": the job's store is gone, and with it the process that served it (rank 0's, or torchrun's) or "
      "its host (", text.substr(0, std::min(text.find('\n'), size_t{150})), ")");
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

void monitored_barrier(
    c10d::Store& store, int rank, int size, uint64_t number, std::chrono::milliseconds timeout, bool wait_all) try {
  const auto prefix_of = [](uint64_t count) { return "monitored" + std::to_string(count) + "/"; };
  const auto prefix = prefix_of(number);
  const auto deadline = Clock::now() + timeout;
  const auto left = [&] { return std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()); };
  store.set(prefix + std::to_string(rank), std::string("here"));
  if (rank > 0) {
    const bool decided = wait_for(store, prefix + "outcome", 2 * timeout);  // rank 0 waits as long for the others
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
  if (missing.empty() && number > 1) {  // all have left the one before
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
