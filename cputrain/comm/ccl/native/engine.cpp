#include "engine.hpp"

#include <algorithm>
#include <fstream>

#include <oneapi/ccl.hpp>
#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "tensors.hpp"

namespace cputrain {

namespace {

// Sleep between two polls of the engine's thread: 1/kSleepsIn of the time since an operation last began or ended, which
// limits the delay in detecting an end to this fraction of the operation's duration.
constexpr Clock::duration kMinSleep = std::chrono::microseconds(20);
constexpr Clock::duration kMaxSleep = std::chrono::microseconds(500);
constexpr int kSleepsIn = 8;
constexpr size_t kEndedGroups = 16;  // destroyed groups that are still reported, for late ranks that wait in them
constexpr auto kExplained = std::chrono::seconds(25);  // limit for a watchdog to explain oneCCL's error
constexpr auto kLook = std::chrono::seconds(1);  // between timeout checks while callers drive, who check only their own
// As in mpi/supervise/activity.py: an idle thread demands less than a fifth of a core, where time in a core's queue counts
// up to eight times the CPU time.
constexpr auto kIdleLook = std::chrono::milliseconds(500);
constexpr int kIdleShare = 5;
constexpr int64_t kQueuedPerUse = 8;

bool is_main_thread() {
  thread_local const bool is_main = gettid() == getpid();
  return is_main;
}

}  // namespace

// Never destroyed, because its threads run until the process exits.
Engine& Engine::instance() {
  static Engine* engine = new Engine();
  return *engine;
}

Engine::Engine() {
  std::thread([this] { run(); }).detach();
  std::thread([this] { look_for_unpolled(); }).detach();
}

void Engine::submit(
    const c10::intrusive_ptr<Operation>& operation,
    std::function<Poll()> start,
    std::function<void()> finish,
    std::function<int()> source) {
  refuse_in_child(operation->description_);
  {
    const auto lock = enter();
    refuse_after_end(operation->description_);
    operation->start_ = std::move(start);
    operation->finish_ = std::move(finish);
    operation->source_ = std::move(source);
    pending_.push_back(operation);
    changed_ = awake_now();
    publish_current();  // before the call, which may block until a late rank arrives
    try {
      const Waiting waiting(*this);
      operation->ended_ = operation->start_();
    } catch (const std::exception& error) {
      pending_.pop_back();
      publish_current();
      refuse(refusal_of(operation->description_, error));
    }
    relieve_callback();
  }
  work_.notify_one();
}

void Engine::refuse_after_end(std::string_view what) {
  const auto lock = enter();
  CPUTRAIN_REQUIRE(aborted_.empty(), aborted_);
  CPUTRAIN_REQUIRE(!exiting_, "ccl: ", what, " was called while the process exits");
}

void Engine::poll_pending() {
  for (const auto& operation : pending_) {
    operation->has_ended_ = operation->has_ended_ || operation->ended_();
  }
}

c10::intrusive_ptr<Operation> Engine::take_ended() {
  const auto found = std::ranges::find_if(pending_, [](const auto& one) { return one->has_ended_; });
  if (found == pending_.end()) {
    return {};
  }
  auto ended = *found;
  pending_.erase(found);
  publish_current();
  changed_ = awake_now();
  return ended;
}

bool Engine::drive() {
  c10::intrusive_ptr<Operation> ended;
  std::string error;
  if (leaving_) {
    return false;
  }
  {
    const Lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || exiting_ || forked_ || !failure_.empty()) {
      return false;
    }
    polls_++;
    try {
      poll_pending();
    } catch (const std::exception& failure) {  // operations before the failed one are already marked
      error = message_of(failure);
    }
    ended = take_ended();
    finishing_ += ended ? 1 : 0;
  }
  // Without the lock, because a future's callback may submit the next operation. Other ended operations stay in
  // pending_, so that another thread can finish them if the callback waits for one.
  while (ended) {
    finish(*ended);
    ended.reset();  // without the lock, because freeing a Python tensor takes the GIL
    const Lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock() && !exiting_) {
      ended = take_ended();
      finishing_ += ended ? 1 : 0;
    }
  }
  if (!error.empty()) {
    fail(error);
  }
  return true;
}

// oneCCL's error does not say which rank is lost or where the ranks are; the watchdog adds this when it has heartbeats
// of all ranks.
void Engine::fail(const std::string& error) {
  {
    const auto lock = enter();
    if (failure_.empty()) {
      failure_ = "oneCCL failed: " + error;
      failed_ = Clock::now();
    }
  }
  if (!watched_) {
    abort("ccl: " + failure());
  }
}

std::string Engine::failure() {
  const auto lock = enter();
  return failure_;
}

void Engine::run() {
  pthread_setname_np(pthread_self(), "cputrain-ccl");
  prctl(PR_SET_TIMERSLACK, 1);  // ns: the default adds 50 us to each sleep
  while (!leaving_) {
    bool drives = false;
    {
      Lock lock(mutex_);
      drives = work_.wait_for(lock, kLook, [this] { return !pending_.empty() && waiting_callers_ == 0; });
    }
    time_out_late();
    if (!drives) {
      continue;
    }
    drive();
    std::this_thread::sleep_for(std::clamp((awake_now() - changed_.load()) / kSleepsIn, kMinSleep, kMaxSleep));
  }
}

// Times out the first overdue operation, because waiting for a future does not poll. As each group has its own timeout,
// this may not be the oldest operation.
void Engine::time_out_late() {
  c10::intrusive_ptr<Operation> late;
  bool unexplained = false;
  {
    const auto lock = enter();
    const auto now = awake_now();
    const auto overdue = std::ranges::find_if(
        pending_, [now](const auto& one) { return now > one->deadline_ && !one->has_ended_; });
    if (overdue != pending_.end() && aborted_.empty()) {
      late = *overdue;
    }
    unexplained = !failure_.empty() && aborted_.empty() && Clock::now() > failed_ + kExplained;
  }
  if (unexplained) {
    abort("ccl: " + failure());
  }
  if (late) {
    time_out(*late);
  }
}

void Engine::publish_current() {
  CurrentCollective current;
  if (!pending_.empty() && aborted_.empty()) {
    const auto& operation = **std::ranges::min_element(
        pending_, {}, [](const auto& one) { return one->deadline_; });
    current = {operation.description_, operation.place_, operation.started_, operation.deadline_};
  }
  const std::lock_guard lock(published_mutex_);
  published_ = std::move(current);
}

void Engine::publish_communicator(CurrentCollective current) {
  const std::lock_guard lock(published_mutex_);
  communicator_ = std::move(current);
}

CurrentCollective Engine::current() {
  const std::lock_guard lock(published_mutex_);
  auto current = published_.collective.empty() ? communicator_ : published_;
  const auto now = awake_now();
  const auto waits_since = std::min(waits_since_.load(), main_thread_.idle_since(now));
  if (!current.collective.empty()) {
    current.waited = now - std::clamp(waits_since, std::min(now, std::max(current.started, changed_.load())), now);
  }
  return current;
}

Engine::Waiting::Waiting(Engine& engine) : engine_(engine), outer_(engine.waits_since_) {
  if (is_main_thread()) {
    engine_.waits_since_ = awake_now();
  }
}

Engine::Waiting::~Waiting() {
  if (is_main_thread()) {
    engine_.waits_since_ = outer_;
  }
}

Clock::time_point MainThread::idle_since(Clock::time_point now) {
  if (now - looked_ >= kIdleLook) {
    int64_t ran = 0, queued = 0;  // nanoseconds
    std::ifstream("/proc/self/schedstat") >> ran >> queued;
    const auto used = ran - ran_;
    const std::chrono::nanoseconds demand(used + std::min(queued - queued_, kQueuedPerUse * used));
    idle_since_ = ran > 0 && demand < (now - looked_) / kIdleShare ? idle_since_ : now;
    looked_ = now, ran_ = ran, queued_ = queued;
  }
  return idle_since_;
}

void Engine::set_absent_ranks(std::string collective, std::string absent) {
  const std::lock_guard lock(published_mutex_);
  absent_from_ = std::move(collective);
  absent_ = std::move(absent);
}

std::string Engine::absent_ranks(const std::string& collective) {
  const std::lock_guard lock(published_mutex_);
  return collective == absent_from_ ? absent_ : "";
}

Progress& Engine::add_group(
    const std::string& key, std::vector<int> ranks, const std::shared_ptr<Ledger>& ledger) {
  const std::lock_guard lock(published_mutex_);
  ledgers_[key] = ledger;
  auto& group = groups_[key];
  group.ranks = std::move(ranks);
  return group;
}

void Engine::end_group(const std::string& key) {
  const std::lock_guard lock(published_mutex_);
  ledgers_.erase(key);
  ended_groups_.push_back(key);
  if (ended_groups_.size() > kEndedGroups) {
    groups_.erase(ended_groups_.front());
    ended_groups_.pop_front();
  }
}

uint64_t Engine::count(Progress& group, uint64_t number, uint64_t digest, uint64_t balance) {
  const std::lock_guard lock(published_mutex_);
  auto& [last, marks, _] = group;
  last.number = number;
  last.digest = mixed(last.digest, digest);
  last.balance += balance;
  for (size_t i = 0; i < std::size(kMarks) && number % kMarks[i] == 0; i++) {
    marks[i] = last;
  }
  return last.digest;
}

std::map<std::string, std::vector<std::array<uint64_t, 3>>> Engine::groups() {
  const std::lock_guard lock(published_mutex_);
  std::map<std::string, std::vector<std::array<uint64_t, 3>>> listed;
  for (const auto& [key, group] : groups_) {
    auto& places = listed[key];
    places.push_back({group.last.number, group.last.digest, group.last.balance});
    for (const auto& mark : group.marks) {
      if (mark.number > 0) {
        places.push_back({mark.number, mark.digest, mark.balance});
      }
    }
  }
  return listed;
}

std::vector<int> Engine::ranks_of(const std::string& key) {
  const std::lock_guard lock(published_mutex_);
  const auto found = groups_.find(key);
  return found == groups_.end() ? std::vector<int>() : found->second.ranks;
}

void Engine::disagree(const std::string& what) {
  {
    const std::lock_guard lock(published_mutex_);
    disagreement_ = what;
  }
  abort(what);
}

std::string Engine::disagreement() {
  const std::lock_guard lock(published_mutex_);
  auto found = disagreement_;
  for (const auto& [_, ledger] : ledgers_) {
    const auto held = ledger.lock();
    found = found.empty() && held ? held->disagreement() : found;
  }
  return found;
}

void Engine::time_out(const Operation& operation) {
  const auto absent = absent_ranks(operation.description_);
  const std::chrono::duration<double> timeout = operation.deadline_ - operation.started_;
  abort(c10::str(
      "ccl: Timed out after ", timeout.count(), " s in ", operation.description_, absent.empty() ? "" : "; ", absent));
}

std::string Engine::reason() {
  const auto lock = enter();
  return aborted_;
}

void Engine::abort(const std::string& reason) {
  if (forked_) {
    return;
  }
  {
    const auto lock = enter();
    if (!aborted_.empty()) {
      return;
    }
    aborted_ = reason;
    failing_ = pending_;  // also kept in pending_, because oneCCL may still write to their buffers
    publish_current();
  }
  fail_pending();
}

bool Engine::idle() {
  if (forked_) {
    return false;
  }
  const auto lock = enter();
  return pending_.empty() && !exiting_;
}

}  // namespace cputrain
