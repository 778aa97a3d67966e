// Threads that drive operations in place of those that a future's callback keeps.
#include "engine.hpp"

#include <pthread.h>

namespace cputrain {

namespace {

constexpr auto kUnpolled = std::chrono::milliseconds(200);  // that operations in flight may be without anybody's poll
constexpr auto kSleep = std::chrono::microseconds(200);

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
  for (const auto& operation : ended) {
    operation->finish();
  }
  finishing--;
  free_relievers_ += was_free;
}

void Engine::relieve_callback() {
  if (finishing > 0 && free_relievers_ == 0) {
    start_reliever();
  }
}

// It ends when nothing is in flight, which is decided under the lock, as is whether another one is needed.
void Engine::start_reliever() {
  free_relievers_++;
  std::thread([this] {
    pthread_setname_np(pthread_self(), "cputrain-relief");
    relieves = true;
    while (true) {
      time_out_late();
      drive();
      {
        const auto lock = enter();
        if (pending_.empty() || !aborted_.empty() || exiting_) {
          free_relievers_--;
          return;
        }
      }
      std::this_thread::sleep_for(kSleep);
    }
  }).detach();
}

// A callback may also wait for what was submitted before it began.
void Engine::look_for_unpolled() {
  uint64_t seen = 0;
  while (true) {
    std::this_thread::sleep_for(kUnpolled);
    const auto lock = enter();
    if (exiting_) {
      return;
    }
    if (!pending_.empty() && aborted_.empty() && polls_ == seen && free_relievers_ == 0) {
      start_reliever();
    }
    seen = polls_;
  }
}

}  // namespace cputrain
