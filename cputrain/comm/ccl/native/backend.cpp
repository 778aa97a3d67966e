#include <Python.h>

#include "backend.hpp"

#include <cstdlib>
#include <random>

#include <ATen/Functions.h>

#include "quiet_start.hpp"

namespace cputrain {

namespace {

// Limit for late ranks to call collectives of a new kind that this rank has called before it destroys the group.
constexpr auto kTurnGrace = std::chrono::seconds(30);
constexpr auto kTurnPause = std::chrono::microseconds(100);

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string random_name() {
  std::random_device source;
  std::string digits;
  for (int i = 0; i < 32; i++) {
    digits += "0123456789abcdef"[source() % 16];
  }
  return digits;
}

// Releases the GIL if this thread holds it.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace

CclBackend::CclBackend(
    c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<int> ranks, Milliseconds timeout, std::string name)
    : Backend(rank, static_cast<int>(ranks.size())),
      name_(std::move(name)),
      options_(c10::make_intrusive<Options>("ccl", timeout)),
      turns_(std::make_shared<std::deque<std::shared_ptr<Turn>>>()) {
  auto& engine = Engine::instance();
  const auto creation = "the creation of group " + name_;
  const auto begun = awake_now();
  const Engine::Waiting waiting(engine);
  engine.publish_communicator({creation, {}, begun, begun + timeout});
  try {
    store_ = store->clone();
    if (rank == 0) {
      store_->set("ledger", random_name());
    }
    // Wait here for late ranks, because oneCCL would wait for them under the lock that every operation needs.
    const bool has_bf16 = __builtin_cpu_supports("avx512bf16") != 0;
    const bool all_have_bf16 = gather_ranks(*store_, rank, size_, timeout, has_bf16, "group " + name_) == size_;
    const auto ledger = store_->get_to_str("ledger");
    ledger_ = std::make_shared<Ledger>(ledger, name_, rank, ranks);
    key_ = name_ + "@" + ledger.substr(0, 8);
    bf16_reduction_ = all_have_bf16 ? Bf16Reduction::oneccl : Bf16Reduction::as_float32;
    bf16_allreduce_ = environment("CCL_ATL_TRANSPORT") == "ofi" ? Bf16Reduction::own : bf16_reduction_;
    kvs_ = std::make_shared<StoreKvs>(store_, "kvs/", timeout);
    message_kvs_ = std::make_shared<StoreKvs>(store_, "messages/", timeout);
    const auto lock = engine.enter();
    {
      const QuietStart out(std::cout), err(std::cerr);
      ccl::init();
    }
    comm_ = std::make_unique<ccl::communicator>(ccl::create_communicator(size_, rank, kvs_));
    if (std::atoi(environment("CCL_WORKER_COUNT").c_str()) > 1) {
      message_comm_ = std::make_unique<ccl::communicator>(ccl::create_communicator(size_, rank, message_kvs_));
    }
    ledger_->unlink();  // all ranks of the communicator have mapped the ledger
    if (!ledger_->has_all()) {
      first_calls_ = std::make_unique<FirstCalls>(store_, size_);
    }
    auto& for_messages = message_comm_ ? *message_comm_ : *comm_;
    inbox_ = std::make_shared<Inbox>(for_messages, size_);
    outbox_ = std::make_shared<Outbox>(for_messages, size_);
    engine.guard_process();
    engine.count_communicators(1);
    progress_ = &engine.add_group(key_, std::move(ranks), ledger_);
  } catch (const c10::DistError& error) {  // the store's error, also from within oneCCL's exchange over it
    engine.publish_communicator({});
    store_is_gone("group " + name_ + " cannot be created", error);
  } catch (const std::exception& error) {
    engine.publish_communicator({});
    if (ledger_) {
      ledger_->unlink();
    }
    const auto text = message_of(error);
    refuse(text.starts_with("ccl: ") ? "" : "ccl: group " + name_ + " cannot be created: ", text);
  }
  engine.publish_communicator({});
}

// A communicator with operations that never end cannot be destroyed and is leaked. It is also leaked while another
// group has operations in flight, because oneCCL waits until other ranks destroy this group, and they may first wait
// for those operations.
CclBackend::~CclBackend() {
  const WithoutGil released;  // oneCCL may wait for other ranks here
  if (message_kvs_) {
    kvs_->leave();
    message_kvs_->leave();
  }
  auto& engine = Engine::instance();
  start_those_in_turn();
  if (engine.idle() && !awaits_messages()) {
    const auto begun = awake_now();
    const Engine::Waiting waiting(engine);
    engine.publish_communicator({"the destruction of group " + name_, {}, begun, begun + options_->timeout});
    const auto lock = engine.enter();
    inbox_.reset();
    outbox_.reset();
    message_comm_.reset();
    comm_.reset();
    engine.count_communicators(-1);
    engine.publish_communicator({});
  } else {
    new std::pair(inbox_, outbox_);
    static_cast<void>(message_comm_.release());
    static_cast<void>(comm_.release());
  }
  engine.end_group(key_);
}

struct CclBackend::Turn {
  std::function<Poll()> start;
  FirstCalls::Agreed agreed;  // null if no agreement is needed
  Poll ended;
  std::string refusal;  // oneCCL's error at the start
};

// Defers an operation's start until all ranks have called it and all operations before it have started. Called under
// the engine's lock, as are the polls. An error of oneCCL at the start fails only this operation, as if it had been
// started in the call.
void CclBackend::put_in_turn(
    std::function<Poll()>& start, std::function<void()>& finish, FirstCalls::Agreed agreed,
    const std::string& description) const {
  const auto turn = std::make_shared<Turn>(Turn{std::move(start), std::move(agreed), {}, {}});
  start = [turn, turns = turns_, description]() -> Poll {
    turns->push_back(turn);
    return [turn, turns, description] {
      if (!turn->ended) {
        if (turns->empty() || turns->front() != turn || (turn->agreed && !*turn->agreed)) {
          return false;
        }
        turns->pop_front();
        try {
          turn->ended = turn->start();
        } catch (const std::exception& error) {
          turn->refusal = refusal_of(description, error);
          turn->ended = [] { return true; };
        }
      }
      return turn->ended();
    };
  };
  finish = [turn, finish = std::move(finish)] {
    CPUTRAIN_REQUIRE(turn->refusal.empty(), turn->refusal);
    finish();
  };
}

// Starts deferred operations before the group is destroyed, because other ranks may wait for them.
void CclBackend::start_those_in_turn() const {
  auto& engine = Engine::instance();
  const auto deadline = Clock::now() + kTurnGrace;
  while (!engine.is_child()) {
    {
      const auto lock = engine.enter();
      if (turns_->empty() || !engine.reason().empty() || Clock::now() > deadline) {
        turns_->clear();
        return;
      }
    }
    engine.drive();
    std::this_thread::sleep_for(kTurnPause);
  }
}

bool CclBackend::awaits_messages() const {
  const auto lock = Engine::instance().enter();
  return inbox_ && inbox_->awaits();
}

// Submits a collective. Ranks number a group's collectives in call order, and compare collectives of equal number.
WorkPtr CclBackend::submit(
    c10d::OpType type, const Tensors& described, Agreement agreement, Milliseconds timeout, Tensors outputs,
    std::function<Events()> launch, std::function<void()> finish) {
  std::function<Poll()> start = [launch = std::move(launch)]() -> Poll {
    const auto events = std::make_shared<Events>(launch());
    return [events] {
      while (!events->empty() && events->back().test()) {
        events->pop_back();
      }
      return events->empty();
    };
  };
  auto& engine = Engine::instance();
  const auto name = c10d::opTypeToString(type);
  if (engine.is_child()) {
    engine.refuse_in_child(name + " of group " + name_);
  }
  const auto details = described.empty() ? "" : " (" + shape_of(described) + agreement.options + ")";
  agreement.add(static_cast<uint64_t>(type));
  c10::intrusive_ptr<Operation> operation;
  std::string wrong;
  {
    const auto lock = engine.enter();
    engine.refuse_after_end(name);
    const uint64_t number = ++sequence_;
    several_threads_ = several_threads_ || (number > 1 && caller_ != std::this_thread::get_id());
    caller_ = std::this_thread::get_id();
    operation = c10::make_intrusive<Operation>(
        rank_, type, "ccl:" + name, name + " #" + std::to_string(number) + " of group " + name_ + details,
        Place{key_, number, engine.count(*progress_, number, agreement.digest, agreement.balance(rank_, number))},
        timeout == c10d::kUnsetTimeout ? options_->timeout : timeout, std::move(outputs));
    if (first_calls_) {
      const auto& last = progress_->last;
      const auto agreed = first_calls_->compare(
          agreement.digest, number, last.digest, agreement.give.empty() ? std::nullopt : std::optional(last.balance));
      if (agreed || !turns_->empty()) {
        put_in_turn(start, finish, agreed, operation->description());
      }
    }
    wrong = ledger_->enter(number, agreement, operation->description(), several_threads_);
    if (wrong.empty()) {
      engine.submit(operation, std::move(start), std::move(finish));
    }
  }
  if (!wrong.empty()) {
    engine.disagree(wrong);
    refuse(engine.reason());
  }
  return operation;
}

// Submits a message, which does not count as a collective, because not all ranks take part.
WorkPtr CclBackend::submit_message(
    c10d::OpType type, const Tensors& described, int peer, std::function<Poll()> start, std::function<void()> finish,
    std::function<int()> source) {
  const auto name = c10d::opTypeToString(type);
  Place place{"", sequence_};
  for (int rank = 0; rank < size_; rank++) {
    if (rank == peer || (peer == kAnySource && rank != rank_)) {
      place.peers.push_back(progress_->ranks[rank]);
    }
  }
  const auto with = peer == kAnySource ? std::string("any rank") : c10::str("rank ", place.peers[0]);
  auto operation = c10::make_intrusive<Operation>(
      rank_, type, "ccl:" + name,
      c10::str(
          name, " #", ++messages_, " of group ", name_, " (", shape_of(described),
          type == c10d::OpType::SEND ? " to " : " from ", with, ")"),
      std::move(place), options_->timeout, described);
  Engine::instance().submit(operation, std::move(start), std::move(finish), std::move(source));
  return operation;
}

WorkPtr CclBackend::barrier(const c10d::BarrierOptions& opts) {
  const auto token = at::zeros({1}, at::kByte);
  return submit(
      c10d::OpType::BARRIER, {}, {}, opts.timeout, {},
      [=, this] {
        Events events;
        events.push_back(
            ccl::allreduce(token.data_ptr(), token.data_ptr(), 1, ccl::datatype::uint8, ccl::reduction::max, *comm_));
        return events;
      },
      [] {});
}

void CclBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
  Engine::instance().refuse_in_child("monitored_barrier of group " + name_);
  monitored_barrier(*store_, rank_, size_, ++monitored_, timeout, wait_all_ranks);
}

}  // namespace cputrain
