// A rank's heartbeats, sent by a thread that needs no Python: a rank whose Python computes for minutes lives.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "clock.hpp"

namespace cputrain {

// OpenSSL's functions that Python's hmac module calls: HMAC(3).
using Sha256 = const void* (*)();
using Hmac = unsigned char* (*)(
    const void* type, const void* key, int key_bytes, const unsigned char* text, size_t bytes, unsigned char* code,
    unsigned int* code_bytes);

// Sends from its construction until it stops, at an interval and where the rank begins to wait in a collective;
// cputrain/comm/watchdog.py reads what it sends.
class HeartbeatSender {
 public:
  // `store` is a connection of its own; `token` signs what is set, as cputrain/comm/store.py does; `place` is the JSON
  // text of what never changes: "host": "n1", "pid": 123, ...
  HeartbeatSender(
      c10::intrusive_ptr<c10d::Store> store, std::string key, std::string token, std::string place, double interval_s,
      Hmac hmac, Sha256 sha256);

  // Stops, and says that this rank has left in order. Waits for `patience_s` at most: the store may not answer.
  void stop(double patience_s);

 private:
  void run();
  bool is_due();
  void send(bool left);
  std::string signature(const std::string& text) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_, token_, place_;
  const std::chrono::duration<double> interval_;
  const Hmac hmac_;
  const Sha256 sha256_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool ended_ = false;
  int64_t count_ = 0;
  std::string seen_, sent_;  // the collective that the rank waited in at the last look, and that it has sent last
  Clock::time_point next_;
};

}  // namespace cputrain
