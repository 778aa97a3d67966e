#include "heartbeat.hpp"

#include <pthread.h>
#include <unistd.h>

#include <c10/util/StringUtil.h>

#include "engine.hpp"
#include "tensors.hpp"

namespace cputrain {

namespace {

constexpr int kLooks = 4;  // per interval

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') {
      made += '\\';
    }
    made += static_cast<unsigned char>(character) < 0x20 ? ' ' : character;
  }
  return made + '"';
}

}  // namespace

HeartbeatSender::HeartbeatSender(
    c10::intrusive_ptr<c10d::Store> store, std::string key, std::string token, std::string place, double interval_s,
    Hmac hmac, Sha256 sha256, int copy)
    : store_(std::move(store)),
      key_(std::move(key)),
      token_(std::move(token)),
      place_(std::move(place)),
      interval_(interval_s),
      hmac_(hmac),
      sha256_(sha256),
      copy_(copy) {
  send(false);
  std::thread([this] { run(); }).detach();
}

void HeartbeatSender::run() {
  pthread_setname_np(pthread_self(), "cputrain-beat");
  std::unique_lock lock(mutex_);
  try {
    while (!changed_.wait_for(lock, interval_ / kLooks, [this] { return stopping_; })) {
      lock.unlock();
      if (is_due()) {
        send(false);
      }
      lock.lock();
    }
    lock.unlock();
    send(true);
    lock.lock();
  } catch (const std::exception&) {
    // The store is gone, which the watchdog also detects by its own connection.
    if (!lock.owns_lock()) {
      lock.lock();
    }
  }
  ended_ = true;
  changed_.notify_all();
}

void HeartbeatSender::stop(double patience_s) {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, std::chrono::duration<double>(patience_s), [this] { return ended_; });
}

// A heartbeat is also due when the rank begins to wait, because another rank's timeout names the absent ranks.
bool HeartbeatSender::is_due() {
  auto current = Engine::instance().current().collective;
  const bool waits = !current.empty() && current == seen_ && current != sent_;
  seen_ = std::move(current);
  return waits || Clock::now() >= next_;
}

void HeartbeatSender::send(bool left) {
  awake_now();
  next_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(interval_);
  const auto current = Engine::instance().current();
  sent_ = current.collective;
  std::string groups;
  for (const auto& [key, places] : Engine::instance().groups()) {
    std::string listed;
    for (const auto& [number, digest, balance] : places) {
      listed += c10::str(listed.empty() ? "[" : ", [", number, ", ", digest, ", ", balance, "]");
    }
    groups += c10::str(groups.empty() ? "" : ", ", quoted(key), ": [", listed, "]");
  }
  const bool waits = !current.collective.empty();
  const auto value = c10::str(
      "{\"count\": ", ++count_, ", ", place_, ", \"waits_in\": ", waits ? quoted(current.collective) : "null",
      ", \"group\": ", quoted(current.place.group), ", \"number\": ", current.place.number, ", \"waited_s\": ",
      current.waited.count(), ", \"groups\": {", groups, "}, \"left\": ", left ? "true" : "false", "}");
  if (const auto line = value + "\n"; copy_ >= 0 && pwrite(copy_, line.data(), line.size(), 0) < 0) {
    copy_ = -1;  // the launcher then knows less; the job goes on
  }
  store_->set(key_, signature("cputrain store " + key_ + " " + value) + " " + value);
}

// Returns the signature in lowercase hexadecimal digits.
std::string HeartbeatSender::signature(const std::string& text) const {
  unsigned char code[64];
  unsigned int bytes = 0;
  const auto* from = reinterpret_cast<const unsigned char*>(text.data());
  const auto* made = hmac_(sha256_(), token_.data(), static_cast<int>(token_.size()), from, text.size(), code, &bytes);
  CPUTRAIN_REQUIRE(made != nullptr, "ccl: OpenSSL cannot sign a heartbeat");
  std::string digits;
  for (unsigned int i = 0; i < bytes; i++) {
    digits += "0123456789abcdef"[code[i] >> 4];
    digits += "0123456789abcdef"[code[i] & 15];
  }
  return digits;
}

}  // namespace cputrain
