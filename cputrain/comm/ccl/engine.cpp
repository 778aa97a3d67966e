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

constexpr auto kShortestRest = std::chrono::microseconds(20);
constexpr auto kLongestRest = std::chrono::microseconds(500);
constexpr auto kLeave = std::chrono::seconds(1);  // for operations that nobody has waited for
constexpr int kSpins = 2000;  // looks of a waiting caller before it gives way between two of them

// Looks once; events that have ended are taken out.
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
  engine.waiting_++;
  for (int looks = 0; !future_->completed(); looks++) {
    engine.drive();
    if (looks > kSpins) {
      std::this_thread::yield();
      if (Clock::now() > deadline) {
        engine.time_out(*this);
        break;
      }
    }
  }
  {
    // Under the lock, or the engine's thread could see a caller that drives, and miss that there is none any more.
    const std::lock_guard lock(engine.mutex_);
    engine.waiting_--;
  }
  engine.work_.notify_one();
  if (future_->hasError()) {
    std::rethrow_exception(future_->exception_ptr());
  }
  return true;
}

// Never destroyed: its thread runs to the process's end.
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
    TORCH_CHECK(!left_, "ccl: ", operation->description_, " at the end of the process: it has no ranks any more");
    operation->launch_ = std::move(launch);
    operation->finish_ = std::move(finish);
    pending_.push_back(operation);
    tell_oldest();  // before the call, which may take as long as a rank is late
    try {
      operation->events_ = operation->launch_();
    } catch (const std::exception& error) {
      pending_.pop_back();
      tell_oldest();
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
    if (!lock.owns_lock() || left_) {
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
      tell_oldest();
    }
  }
  // Outside the lock: what waits for a future may submit the next operation.
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
  auto rest = kShortestRest;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return !pending_.empty() && waiting_ == 0; });
    }
    const auto before = time_out_late();
    drive();
    rest = time_out_late() < before ? kShortestRest : std::min(2 * rest, kLongestRest);
    std::this_thread::sleep_for(rest);
  }
}

// Ends what has been in flight for too long, as those who wait for a future do not look themselves; how many are left.
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

void Engine::tell_oldest() {
  if (pending_.empty() || !aborted_.empty()) {
    tell({});
  } else {
    const auto& oldest = *pending_.front();
    tell({oldest.description_, oldest.sequence_, oldest.deadline_});
  }
}

void Engine::tell(Waiting waiting) {
  const std::lock_guard lock(told_mutex_);
  waiting_for_ = std::move(waiting);
}

Waiting Engine::waits_in() {
  const std::lock_guard lock(told_mutex_);
  return waiting_for_;
}

void Engine::note(std::string absent) {
  const std::lock_guard lock(told_mutex_);
  absent_ = std::move(absent);
}

void Engine::time_out(const Operation& operation) {
  std::string absent;
  {
    const std::lock_guard lock(told_mutex_);
    absent = absent_.empty() ? "" : "; " + absent_;
  }
  const auto waited = std::chrono::duration<double>(Clock::now() - operation.started_).count();
  abort(c10::str("ccl: Timed out after ", std::round(waited), " s in ", operation.description_, absent));
}

void Engine::abort(const std::string& reason) {
  std::list<c10::intrusive_ptr<Operation>> lost;
  {
    const std::lock_guard lock(mutex_);
    if (!aborted_.empty()) {
      return;
    }
    aborted_ = reason;
    lost = pending_;  // they stay there too: their buffers may still be written to
    tell_oldest();
  }
  for (const auto& operation : lost) {
    operation->future_->setErrorIfNeeded(std::make_exception_ptr(std::runtime_error(reason)));
  }
}

std::unique_lock<std::mutex> Engine::enter() {
  return std::unique_lock(mutex_);
}

bool Engine::idle() {
  const std::lock_guard lock(mutex_);
  return pending_.empty() && !left_;
}

void Engine::mind_exit() {
  static const int registered = on_exit([](int status, void*) { instance().leave(status); }, nullptr);
  TORCH_CHECK(registered == 0, "on_exit failed");
}

// Before oneCCL's own parts are destroyed: no thread of ours calls it from here on, and nobody hears of what ends now.
// Where an operation does not end, those parts stay in use, and would crash or wait for ever: they are left to the kernel.
void Engine::leave(int status) {
  const auto until = Clock::now() + kLeave;
  bool busy = true;
  for (bool given_up = false; busy && !given_up; std::this_thread::yield()) {
    given_up = Clock::now() > until;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      continue;
    }
    left_ = true;
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
