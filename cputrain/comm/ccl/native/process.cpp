// Forks and the exit of a process that runs oneCCL.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include <oneapi/ccl.hpp>
#include <pthread.h>
#include <unistd.h>

#include "engine.hpp"
#include "tensors.hpp"

namespace cputrain {

namespace {

constexpr auto kExitGrace = std::chrono::seconds(1);  // for operations in flight that no caller waits for
// For a call of oneCCL to return before a fork: one that waits for a lost rank does not.
constexpr auto kForkPatience = std::chrono::seconds(5);
thread_local bool holds_for_fork = false;

}  // namespace

void Engine::refuse_in_child(const std::string& what) {
  CPUTRAIN_REQUIRE(
      !forked_, "ccl: ", what, " was called in a process forked after the group was created, which shares oneCCL's "
      "memory with its parent: call collectives in the parent, or start the process with the spawn method");
}

// While a process forks, no thread of it is inside oneCCL or MPI, unless one is stuck there: what the child copies is
// then not whole, but the child leaves it alone.
void Engine::guard_process() {
  static const bool guarded = [] {
    // A child's lock stays locked, as no thread of it may drive: where it forks itself, it must not wait for it.
    const auto prepare = [] {
      holds_for_fork = !instance().forked_ && instance().mutex_.try_lock_for(kForkPatience);
    };
    const auto parent = [] {
      if (std::exchange(holds_for_fork, false)) {
        instance().mutex_.unlock();
      }
    };
    const auto child = [] { instance().forked_ = true; };
    const int forks = pthread_atfork(prepare, parent, child);
    const int exits = on_exit([](int status, void*) { instance().on_process_exit(status); }, nullptr);
    CPUTRAIN_REQUIRE(forks == 0 && exits == 0, "ccl: the handlers of fork and exit cannot be registered");
    return true;
  }();
  static_cast<void>(guarded);
}

// Runs before oneCCL's own exit handlers: no thread calls oneCCL from here on. Where an operation is still in flight
// after a grace period, oneCCL's handlers would crash or hang, so the process exits without them. A forked child, which
// shares oneCCL's memory and connections with its parent, always does.
void Engine::on_process_exit(int status) {
  const auto deadline = Clock::now() + kExitGrace;
  bool busy = true;
  for (bool given_up = forked_; busy && !given_up; std::this_thread::yield()) {
    given_up = Clock::now() > deadline;
    const Lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      continue;
    }
    exiting_ = true;
    given_up = given_up || !aborted_.empty();
    try {
      static auto* kept = new Operations();  // nothing is destroyed from here on
      take_ended(*kept);
      busy = !pending_.empty();
    } catch (const std::exception&) {
      given_up = true;
    }
  }
  if (busy) {
    std::fflush(nullptr);
    _exit(status);
  }
}

}  // namespace cputrain
