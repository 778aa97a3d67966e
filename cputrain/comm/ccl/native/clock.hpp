// A clock that stands still while the process does: timeouts do not run while a job is suspended.
#pragma once

#include <atomic>
#include <chrono>

namespace cputrain {

using Clock = std::chrono::steady_clock;

constexpr auto kSuspension = std::chrono::seconds(7);  // the heartbeat reads the clock every two seconds

// The steady clock without the gaps of more than kSuspension between two readings by any thread of this process.
inline Clock::time_point awake_now() {
  static std::atomic<Clock::rep> last{Clock::now().time_since_epoch().count()};
  static std::atomic<Clock::rep> suspended{0};
  const auto now = Clock::now();
  const auto previous = last.exchange(now.time_since_epoch().count());
  const auto gap = now.time_since_epoch().count() - previous;
  if (gap > Clock::duration(kSuspension).count()) {
    suspended += gap;
  }
  return now - Clock::duration(suspended);
}

}  // namespace cputrain
