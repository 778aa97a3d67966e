#include "engine.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <ATen/core/grad_mode.h>
#include <pthread.h>
#include <unistd.h>

namespace cputrain {

namespace {

constexpr auto kMinSleep = std::chrono::microseconds(20);
constexpr auto kMaxSleep = std::chrono::microseconds(500);
constexpr auto kExitGrace = std::chrono::seconds(1);  // for operations in flight that no caller waits for
constexpr int kPolls = 2000;  // of a waiting caller before it yields the CPU between two polls

// Polls once and removes the events that have ended; whether any is left.
bool in_flight(Events& events) {
  while (!events.empty() && events.back().test()) {
    events.pop_back();
  }
  return !events.empty();
}

}  // namespace

Operation::Operation(
    int rank,
    c10d::OpType type,
    const std::string& title,
    std::string description,
    uint64_t sequence,
    std::chrono::milliseconds timeout,
    std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, title.c_str()),
      description_(std::move(description)),
      sequence_(sequence),
      started_(Clock::now()),
      deadline_(started_ + timeout),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

bool Operation::isCompleted() {
  if (!future_->completed()) {
    Engine::instance().drive();
  }
  return future_->completed();
}

bool Operation::isSuccess() const {
  return future_->completed() && !future_->hasError();
}

std::exception_ptr Operation::exception() const {
  return future_->hasError() ? future_->exception_ptr() : nullptr;
}

std::vector<at::Tensor> Operation::result() {
  return outputs_;
}

c10::intrusive_ptr<c10::ivalue::Future> Operation::getFuture() {
  return future_;
}

uint64_t Operation::getSequencenumber() const {
  return sequence_;
}

bool Operation::wait(std::chrono::milliseconds timeout) {
  auto& engine = Engine::instance();
  const auto deadline = timeout == kNoTimeout ? deadline_ : std::min(deadline_, Clock::now() + timeout);
  engine.waiting_callers_++;
  for (int polls = 0; !future_->completed(); polls++) {
    engine.drive();
    if (polls > kPolls) {
      std::this_thread::yield();
      if (Clock::now() > deadline) {
        engine.time_out(*this);
        break;
      }
    }
  }
  {
    // Under the lock: the engine's thread could otherwise miss that the last waiting caller has gone.
    const std::lock_guard lock(engine.mutex_);
    engine.waiting_callers_--;
  }
  engine.work_.notify_one();
  if (future_->hasError()) {
    std::rethrow_exception(future_->exception_ptr());
  }
  return true;
}

// Never destroyed: its thread runs until the process exits.
Engine& Engine::instance() {
  static Engine* engine = new Engine();
  return *engine;
}

Engine::Engine() {
  std::thread([this] { run(); }).detach();
}

void Engine::submit(
    const c10::intrusive_ptr<Operation>& operation,
    std::function<Events()> launch,
    std::function<void()> finish) {
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(aborted_.empty(), aborted_);
    TORCH_CHECK(!exiting_, "ccl: ", operation->description_, " was called while the process exits");
    operation->launch_ = std::move(launch);
    operation->finish_ = std::move(finish);
    pending_.push_back(operation);
    publish_oldest();  // before the call, which may take as long as a rank is late
    try {
      operation->events_ = operation->launch_();
    } catch (const std::exception& error) {
      pending_.pop_back();
      publish_oldest();
      TORCH_CHECK(false, "oneCCL refused ", operation->description_, ": ", error.what());
    }
  }
  work_.notify_one();
}

bool Engine::drive() {
  std::list<c10::intrusive_ptr<Operation>> done;
  std::string error;
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || exiting_) {
      return false;
    }
    try {
      for (auto at = pending_.begin(); at != pending_.end();) {
        auto next = std::next(at);
        if (!in_flight((*at)->events_)) {
          done.splice(done.end(), pending_, at);
        }
        at = next;
      }
    } catch (const ccl::exception& failure) {
      error = failure.what();
    }
    if (!done.empty()) {
      publish_oldest();
    }
  }
  // Outside the lock: a future's callback may submit the next operation.
  for (const auto& operation : done) {
    try {
      const at::NoGradGuard unrecorded;
      operation->finish_();
      if (operation->recordFunctionEndCallback_) {
        operation->recordFunctionEndCallback_();
      }
      operation->launch_ = nullptr;
      operation->finish_ = nullptr;
      operation->future_->markCompleted(operation->outputs_);
    } catch (const std::exception& failure) {
      operation->future_->setErrorIfNeeded(std::make_exception_ptr(std::runtime_error(failure.what())));
    }
  }
  if (!error.empty()) {
    abort("ccl: oneCCL failed: " + error);
  }
  return true;
}

void Engine::run() {
  pthread_setname_np(pthread_self(), "cputrain-ccl");
  auto sleep = kMinSleep;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return !pending_.empty() && waiting_callers_ == 0; });
    }
    const auto before = time_out_late();
    drive();
    sleep = time_out_late() < before ? kMinSleep : std::min(2 * sleep, kMaxSleep);
    std::this_thread::sleep_for(sleep);
  }
}

// Times out the oldest operation if it is overdue, since waiting for a future does not poll; the number in flight.
size_t Engine::time_out_late() {
  c10::intrusive_ptr<Operation> late;
  size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    count = pending_.size();
    if (count > 0 && aborted_.empty() && Clock::now() > pending_.front()->deadline_) {
      late = pending_.front();
    }
  }
  if (late) {
    time_out(*late);
  }
  return count;
}

void Engine::publish_oldest() {
  if (pending_.empty() || !aborted_.empty()) {
    publish({});
  } else {
    const auto& oldest = *pending_.front();
    publish({oldest.description_, oldest.sequence_, oldest.deadline_});
  }
}

void Engine::publish(CurrentCollective current) {
  const std::lock_guard lock(published_mutex_);
  published_ = std::move(current);
}

CurrentCollective Engine::current() {
  const std::lock_guard lock(published_mutex_);
  return published_;
}

void Engine::set_absent_ranks(std::string absent) {
  const std::lock_guard lock(published_mutex_);
  absent_ = std::move(absent);
}

void Engine::time_out(const Operation& operation) {
  std::string absent;
  {
    const std::lock_guard lock(published_mutex_);
    absent = absent_.empty() ? "" : "; " + absent_;
  }
  const auto waited = std::chrono::duration<double>(Clock::now() - operation.started_).count();
  abort(c10::str("ccl: Timed out after ", std::round(waited), " s in ", operation.description_, absent));
}

void Engine::abort(const std::string& reason) {
  std::list<c10::intrusive_ptr<Operation>> failed;
  {
    const std::lock_guard lock(mutex_);
    if (!aborted_.empty()) {
      return;
    }
    aborted_ = reason;
    failed = pending_;  // they stay in pending_: oneCCL may still write to their buffers
    publish_oldest();
  }
  for (const auto& operation : failed) {
    operation->future_->setErrorIfNeeded(std::make_exception_ptr(std::runtime_error(reason)));
  }
}

std::unique_lock<std::mutex> Engine::enter() {
  return std::unique_lock(mutex_);
}

bool Engine::idle() {
  const std::lock_guard lock(mutex_);
  return pending_.empty() && !exiting_;
}

void Engine::register_exit_handler() {
  static const int registered = on_exit([](int status, void*) { instance().on_process_exit(status); }, nullptr);
  TORCH_CHECK(registered == 0, "on_exit failed");
}

// Runs before oneCCL's own exit handlers: no thread calls oneCCL from here on. Where an operation is still in flight
// after a grace period, oneCCL's handlers would crash or hang, so the process exits without them.
void Engine::on_process_exit(int status) {
  const auto deadline = Clock::now() + kExitGrace;
  bool busy = true;
  for (bool given_up = false; busy && !given_up; std::this_thread::yield()) {
    given_up = Clock::now() > deadline;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      continue;
    }
    exiting_ = true;
    given_up = given_up || !aborted_.empty();
    try {
      busy = std::ranges::any_of(pending_, [](const auto& operation) { return in_flight(operation->events_); });
    } catch (const ccl::exception&) {
      given_up = true;
    }
  }
  if (busy) {
    std::fflush(nullptr);
    _exit(status);
  }
}

}  // namespace cputrain
