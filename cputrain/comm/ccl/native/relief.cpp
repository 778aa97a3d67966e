// Relievers: threads that drive operations while other threads are blocked in callbacks of futures.
#include "engine.hpp"

#include <system_error>

#include <c10/util/ScopeExit.h>
#include <pthread.h>

namespace cputrain {

namespace {

constexpr auto kUnpolled = std::chrono::milliseconds(200);  // after this time without a poll, a reliever is started
constexpr auto kReliefSleep = std::chrono::microseconds(200);

thread_local bool relieves = false;
thread_local int finishing = 0;  // calls of finish() on this thread's stack, as a callback may drive

// Returns whether a thread was started. If the limit of threads is reached, look_for_unpolled tries again.
bool start_thread(std::function<void()> work) {
  try {
    std::thread(std::move(work)).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace

void Engine::finish(Operation& ended) {
  const bool was_free = relieves && finishing == 0;
  free_relievers_ -= was_free;
  finishing++;
  // Also runs if the thread ends in a callback, as Python ends threads that request the GIL at interpreter exit.
  const auto counted = c10::make_scope_exit([&] {
    finishing--;
    free_relievers_ += was_free;
    finishing_--;
  });
  ended.finish();
}

bool Engine::finishes_elsewhere() const {
  return finishing_ > finishing;
}

void Engine::relieve_callback() {
  if (finishing > 0 && free_relievers_ == 0) {
    start_reliever();
  }
}

// A reliever ends when nothing is in flight. This is decided under the lock, as is the start of another one.
void Engine::start_reliever() {
  free_relievers_ += start_thread([this] { relieve(); });
}

void Engine::relieve() {
  pthread_setname_np(pthread_self(), "cputrain-relief");
  relieves = true;
  while (!leaving_) {
    time_out_late();
    drive();
    {
      const auto lock = enter();
      if (pending_.empty() || !aborted_.empty()) {
        free_relievers_--;
        return;
      }
    }
    std::this_thread::sleep_for(kReliefSleep);
  }
}

// Fails operations one by one. If a callback waits for another operation, look_for_unpolled starts a second thread.
void Engine::fail_pending() {
  while (true) {
    c10::intrusive_ptr<Operation> operation;
    {
      const auto lock = enter();
      if (failing_.empty()) {
        return;
      }
      operation = failing_.front();
      failing_.pop_front();
    }
    operation->fail(aborted_);
  }
}

// Starts threads if nobody polls or fails operations, because a callback may also wait for earlier operations.
void Engine::look_for_unpolled() {
  pthread_setname_np(pthread_self(), "cputrain-look");
  uint64_t seen = 0;
  size_t unfailed = 0;
  while (!leaving_) {
    std::this_thread::sleep_for(kUnpolled);
    const auto lock = enter();
    if (!pending_.empty() && aborted_.empty() && polls_ == seen && free_relievers_ == 0) {
      start_reliever();
    }
    if (!failing_.empty() && failing_.size() == unfailed) {
      start_thread([this] { fail_pending(); });
    }
    seen = polls_;
    unfailed = failing_.size();
    look_for_disagreement();
  }
}

// Needs the engine's lock.
void Engine::look_for_disagreement() {
  if (const auto found = disagreement(); !found.empty() && aborted_.empty()) {
    start_thread([this, found] { disagree(found); });
  }
}

}  // namespace cputrain
