// Sends a rank's heartbeats from a thread that does not need the GIL, so that long calls do not stop them.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "clock.hpp"

namespace cputrain {

// OpenSSL functions, which Python's hmac module also uses; see HMAC(3).
using Sha256 = const void* (*)();
using Hmac = unsigned char* (*)(
    const void* type, const void* key, int key_bytes, const unsigned char* text, size_t bytes, unsigned char* code,
    unsigned int* code_bytes);

// Sends heartbeats from construction to `stop`, at an interval and when the rank begins to wait in a collective;
// cputrain/comm/watchdog.py reads them.
class HeartbeatSender {
 public:
  // `store` is a separate connection; `token` signs values as in cputrain/comm/store.py; `place` is the JSON text of
  // the constant fields: "host": "n1", "pid": 123, ... Heartbeats are also written to the open file `copy`, unless it is
  // negative, for the launcher.
  HeartbeatSender(
      c10::intrusive_ptr<c10d::Store> store, std::string key, std::string token, std::string place, double interval_s,
      Hmac hmac, Sha256 sha256, int copy);

  // Stops, and reports that this rank has left normally; waits at most `patience_s` for the store.
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
  int copy_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool ended_ = false;
  int64_t count_ = 0;
  std::string seen_, sent_;  // the collective in which the rank waited at the last look, and in the last heartbeat
  Clock::time_point next_;
};

}  // namespace cputrain
