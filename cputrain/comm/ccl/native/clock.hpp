// A clock that stops while the process is suspended, so that timeouts do not expire then.
#pragma once

#include <atomic>
#include <chrono>

namespace cputrain {

using Clock = std::chrono::steady_clock;

constexpr auto kNever = Clock::time_point::max();

constexpr auto kSuspension = std::chrono::seconds(7);  // longest gap between reads of the clock, normally every 2 s

// Returns the steady clock's time without gaps of more than kSuspension between two reads by any thread of the process.
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
