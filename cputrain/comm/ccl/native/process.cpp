// Handles forks and the exit of a process that runs oneCCL.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include <oneapi/ccl.hpp>
#include <pthread.h>
#include <unistd.h>

#include "engine.hpp"
#include "mpi_end.hpp"
#include "tensors.hpp"

namespace cputrain {

namespace {

constexpr auto kExitGrace = std::chrono::seconds(1);  // limit for operations in flight for which no caller waits
constexpr auto kEndOfMpi = std::chrono::seconds(30);  // limit for MPI to end with operations in flight
constexpr auto kSupervised = "CPUTRAIN_RANKS";  // variable of the ranks of cputrain launch (mpi/supervise/guard.py)
constexpr auto kExitPause = std::chrono::microseconds(100);
// Limit for a call of oneCCL to return before a fork; a call that waits for a lost rank does not return.
constexpr auto kForkPatience = std::chrono::seconds(5);
thread_local bool holds_for_fork = false;

}  // namespace

void Engine::refuse_in_child(const std::string& what) {
  CPUTRAIN_REQUIRE(
      !forked_, "ccl: ", what, " was called in a process forked after the group was created, which shares oneCCL's "
      "memory with its parent: call collectives in the parent, or start the process with the spawn method");
}

// While the process forks, none of its threads is inside oneCCL or MPI, unless it is stuck there; the child then copies
// an inconsistent state, but does not use it.
void Engine::guard_process() {
  static const bool guarded = [] {
    // A child's lock stays locked, as none of its threads may drive, so it is not taken when a child forks.
    const auto prepare = [] {
      holds_for_fork = !instance().forked_ && instance().mutex_.try_lock_for(kForkPatience);
      instance().published_mutex_.lock();  // the child needs it, too
    };
    const auto parent = [] {
      instance().published_mutex_.unlock();
      if (std::exchange(holds_for_fork, false)) {
        instance().mutex_.unlock();
      }
    };
    const auto child = [] {
      instance().published_mutex_.unlock();
      instance().forked_ = true;
    };
    const int forks = pthread_atfork(prepare, parent, child);
    const int exits = on_exit([](int status, void*) { instance().on_process_exit(status); }, nullptr);
    CPUTRAIN_REQUIRE(forks == 0 && exits == 0, "ccl: the handlers of fork and exit cannot be registered");
    return true;
  }();
  static_cast<void>(guarded);
}

// Waits until a deadline for all operations to end and all callbacks of other threads to return; returns whether they
// have. From the start, no other thread calls oneCCL.
bool Engine::end_operations(Clock::time_point deadline) {
  static auto* kept = new Operations();  // keeps operations alive, as nothing may be destroyed at exit
  Lock lock(mutex_, std::defer_lock);
  while (lock.try_lock_until(deadline)) {
    exiting_ = true;
    try {
      poll_pending();
    } catch (const std::exception&) {
      return false;
    }
    while (auto ended = take_ended()) {
      kept->push_back(std::move(ended));
    }
    if (pending_.empty() && !finishes_elsewhere()) {
      return true;
    }
    if ((!pending_.empty() && !aborted_.empty()) || Clock::now() > deadline) {
      return false;
    }
    lock.unlock();
    std::this_thread::sleep_for(kExitPause);
  }
  return false;
}

// Exits with this status at a deadline, in case the main thread is stuck in MPI.
static void exit_at(Clock::time_point deadline, int status) {
  std::thread([=] {
    std::this_thread::sleep_until(deadline);
    _exit(status);
  }).detach();
}

// Runs before oneCCL's exit handlers. If an operation is still in flight after a grace period, these would crash or
// hang, so the process exits without them. So does a forked child, which shares oneCCL's memory and connections with
// its parent. If a communicator still exists, oneCCL does not finalize MPI, and the launcher kills the other ranks and
// returns 255. MPI is therefore ended here: finalized after success; aborted after a failure, as MPI_Finalize would
// wait for ranks that wait for this one, unless our launcher supervises the ranks: it reports failures and ends jobs.
void Engine::on_process_exit(int status) {
  leaving_ = true;  // before taking the lock, which driving threads would otherwise take again and again
  const bool ended = !forked_ && end_operations(Clock::now() + kExitGrace);
  if (!forked_ && (!ended || communicators_ > 0)) {
    std::fflush(nullptr);
    if (!ended) {
      exit_at(Clock::now() + kEndOfMpi, status);
    }
    if (status == 0) {
      if (end_mpi()) {
        _exit(status);
      }
    } else if (std::getenv(kSupervised) == nullptr) {
      abort_mpi(status);
    }
  }
  if (!ended) {
    std::fflush(nullptr);
    _exit(status);
  }
}

}  // namespace cputrain
