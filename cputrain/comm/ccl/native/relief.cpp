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

}  // namespace

void Engine::finish(const Operations& ended) {
  if (ended.empty()) {
    return;
  }
  const bool was_free = relieves && finishing == 0;
  free_relievers_ -= was_free;
  finishing++;
  // Also where a thread ends in a callback, as Python ends those that want its lock while the interpreter exits.
  const auto counted = c10::make_scope_exit([&] {
    finishing--;
    free_relievers_ += was_free;
    finishing_--;
  });
  for (const auto& operation : ended) {
    operation->finish();
  }
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
  try {
    std::thread([this] { relieve(); }).detach();
    free_relievers_++;
  } catch (const std::system_error&) {
    // No more threads at the moment: look_for_unpolled tries again.
  }
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

// A callback may also wait for what was submitted before it began.
void Engine::look_for_unpolled() {
  pthread_setname_np(pthread_self(), "cputrain-look");
  uint64_t seen = 0;
  while (!leaving_) {
    std::this_thread::sleep_for(kUnpolled);
    const auto lock = enter();
    if (!pending_.empty() && aborted_.empty() && polls_ == seen && free_relievers_ == 0) {
      start_reliever();
    }
    seen = polls_;
  }
}

}  // namespace cputrain
