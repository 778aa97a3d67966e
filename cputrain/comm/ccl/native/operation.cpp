#include "operation.hpp"

#include <ATen/core/LegacyTypeDispatch.h>

#include "engine.hpp"
#include "tensors.hpp"

namespace cputrain {

namespace {

constexpr int kPolls = 2000;  // polls of a waiting caller before it yields the CPU between polls

}  // namespace

Operation::Operation(
    int rank,
    c10d::OpType type,
    const std::string& title,
    std::string description,
    Place place,
    std::chrono::milliseconds timeout,
    std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, title.c_str()),
      description_(std::move(description)),
      place_(std::move(place)),
      started_(awake_now()),
      deadline_(started_ + timeout),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      caller_(at::ThreadLocalState()) {}

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
  return place_.number;
}

int Operation::sourceRank() const {
  CPUTRAIN_REQUIRE(source_, "ccl: only a receive has a source rank");
  return source_();
}

bool Operation::wait(std::chrono::milliseconds timeout) {
  auto& engine = Engine::instance();
  engine.refuse_in_child(description_);
  const auto begun = awake_now();
  const bool brief = timeout != kNoTimeout && begun + timeout < deadline_;
  const auto limit = brief ? begun + timeout : deadline_;
  bool late = false;
  const Engine::Waiting waiting(engine);
  engine.waiting_callers_++;
  for (int polls = 0; !future_->completed() && !late; polls++) {
    engine.drive();
    if (polls > kPolls) {
      std::this_thread::yield();
      late = awake_now() > limit;
    }
  }
  {
    // Under the lock, so that the engine's thread does not miss that the last waiting caller has left.
    const auto lock = engine.enter();
    engine.waiting_callers_--;
  }
  engine.work_.notify_one();
  if (late && brief && !future_->completed()) {
    refuse("ccl: waited ", timeout.count() / 1000.0, " s for ", description_, ", which is still in flight");
  }
  if (late && !future_->completed()) {
    engine.time_out(*this);
  }
  future_->wait();  // returns at once unless another thread is just finishing or failing the operation
  if (future_->hasError()) {
    std::rethrow_exception(future_->exception_ptr());
  }
  return true;
}

void Operation::finish() {
  try {
    {
      const at::ThreadLocalStateGuard as_caller(*caller_);
      // Below autograd, like PyTorch's backends, because inference tensors may be written in any mode.
      const at::AutoDispatchBelowADInplaceOrView unrecorded;
      finish_();
    }
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
    }
    start_ = nullptr;
    finish_ = nullptr;
    ended_ = nullptr;
    caller_.reset();
    future_->markCompleted(outputs_);
  } catch (const std::exception& error) {
    fail(message_of(error));
  }
}

void Operation::fail(const std::string& reason) {
  future_->setErrorIfNeeded(std::make_exception_ptr(std::runtime_error(reason)));
}

}  // namespace cputrain
