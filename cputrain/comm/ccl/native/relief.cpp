// Threads that drive operations in place of those that a future's callback keeps.
#include "engine.hpp"

#include <system_error>

#include <c10/util/ScopeExit.h>
#include <pthread.h>

namespace cputrain {

namespace {

constexpr auto kUnpolled = std::chrono::milliseconds(200);  // that operations in flight may be without anybody's poll
constexpr auto kReliefSleep = std::chrono::microseconds(200);

thread_local bool relieves = false;
thread_local int finishing = 0;  // calls of finish() on this thread's stack: a callback may drive too

// Whether there is one: there may be no more threads at the moment, and look_for_unpolled tries again.
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
  // Also where a thread ends in a callback, as Python ends those that want its lock while the interpreter exits.
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

// It ends when nothing is in flight, which is decided under the lock, as is whether another one is needed.
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

// One after the other. Where a callback of one waits for another one, look_for_unpolled starts a second thread.
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

// A callback may also wait for what was submitted before it began.
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
