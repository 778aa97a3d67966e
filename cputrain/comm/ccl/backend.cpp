// The c10d backend "ccl": PyTorch's collectives on CPU tensors over oneCCL. Each method lays out buffers and hands one
// operation to the engine; what oneCCL lacks is composed from what it has, or refused by name.
#include <sys/types.h>
#include <unistd.h>

#include <bit>
#include <numeric>
#include <optional>
#include <tuple>

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include "engine.hpp"

namespace cputrain {

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;
using c10d::ReduceOp;

ccl::datatype datatype_of(at::ScalarType type) {
  switch (type) {
    case at::kByte:
    case at::kBool:
      return ccl::datatype::uint8;
    case at::kChar:
      return ccl::datatype::int8;
    case at::kShort:
      return ccl::datatype::int16;
    case at::kUInt16:
      return ccl::datatype::uint16;
    case at::kInt:
      return ccl::datatype::int32;
    case at::kUInt32:
      return ccl::datatype::uint32;
    case at::kLong:
      return ccl::datatype::int64;
    case at::kUInt64:
      return ccl::datatype::uint64;
    case at::kHalf:
      return ccl::datatype::float16;
    case at::kBFloat16:
      return ccl::datatype::bfloat16;
    case at::kFloat:
      return ccl::datatype::float32;
    case at::kDouble:
      return ccl::datatype::float64;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "ccl cannot reduce ", type, ": convert the tensor first");
  }
}

const char* name_of(ReduceOp::RedOpType op) {
  static const char* names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused"};
  return names[op];
}

void check_one(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "ccl takes one tensor per rank, found ", tensors.size());
}

void check_dense(const Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().is_cpu() && tensor.layout() == at::kStrided,
      "ccl takes dense CPU tensors, found ", tensor.layout(), " on ", tensor.device());
}

void check_dense(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    check_dense(tensor);
  }
}

// All of a tensor's bytes; moving them needs no knowledge of its type.
Tensor bytes_of(const Tensor& contiguous) {
  return at::from_blob(contiguous.data_ptr(), {static_cast<int64_t>(contiguous.nbytes())}, at::kByte);
}

// oneCCL truncates bfloat16 sums and products on processors without AVX512-BF16. These functions round to nearest, ties
// to even, on every processor; oneCCL accepts custom functions for all-reduces over libfabric only.
inline float widened(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t rounded(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto nearest = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  return value != value ? static_cast<uint16_t>(0x7fc0) : nearest;
}

__attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3"))) void add_bfloat16(
    const uint16_t* in, uint16_t* inout, size_t count) {
  for (size_t i = 0; i < count; i++) {
    inout[i] = rounded(widened(in[i]) + widened(inout[i]));
  }
}

__attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3"))) void multiply_bfloat16(
    const uint16_t* in, uint16_t* inout, size_t count) {
  for (size_t i = 0; i < count; i++) {
    inout[i] = rounded(widened(in[i]) * widened(inout[i]));
  }
}

template <void (*Combine)(const uint16_t*, uint16_t*, size_t)>
void reduce_bfloat16(
    const void* in, size_t count, void* inout, size_t* out_count, ccl::datatype, const ccl::fn_context*) {
  Combine(static_cast<const uint16_t*>(in), static_cast<uint16_t*>(inout), count);
  if (out_count != nullptr) {
    *out_count = count;
  }
}

// A tensor in the form in which it is reduced, the reduction, and the divisor of the result.
struct Reduction {
  Tensor values;
  ccl::reduction op;
  ccl::reduction_fn function;  // set where op is custom
  double divisor;

  ccl::allreduce_attr attributes() const {
    auto made = ccl::create_operation_attr<ccl::allreduce_attr>();
    if (function != nullptr) {
      made.set<ccl::allreduce_attr_id::reduction_fn>(function);
    }
    return made;
  }
};

// Who adds and multiplies bfloat16 values: the functions above, oneCCL, or oneCCL after widening them to float32.
enum class Bf16Reduction { own, oneccl, as_float32 };

// Converts a tensor for a reduction: complex numbers become pairs, booleans 0 and 1.
Reduction reduction_of(const Tensor& tensor, ReduceOp::RedOpType op, int size, Bf16Reduction bf16) {
  const auto type = tensor.scalar_type();
  const bool adds = op == ReduceOp::SUM || op == ReduceOp::AVG;
  TORCH_CHECK(op <= ReduceOp::MAX, "ccl cannot reduce by ", name_of(op), " here: use sum, avg, product, min or max");
  TORCH_CHECK(
      !tensor.is_complex() || adds, "ccl cannot reduce complex numbers by ", name_of(op),
      ": reduce their real and imaginary parts");
  TORCH_CHECK(
      op != ReduceOp::AVG || tensor.is_floating_point() || tensor.is_complex(),
      "ccl cannot average ", type, ": sum, then divide with the rounding that you need");
  auto values = tensor.contiguous();
  if (tensor.is_complex()) {
    values = at::view_as_real(values);
  }
  auto how = adds ? ccl::reduction::sum
             : op == ReduceOp::PRODUCT ? ccl::reduction::prod
             : op == ReduceOp::MIN ? ccl::reduction::min
                                   : ccl::reduction::max;
  ccl::reduction_fn function = nullptr;
  if (type == at::kBool) {
    how = op == ReduceOp::SUM || op == ReduceOp::MAX ? ccl::reduction::max : ccl::reduction::min;
  } else if (type == at::kBFloat16 && (adds || op == ReduceOp::PRODUCT)) {
    if (bf16 == Bf16Reduction::own) {
      how = ccl::reduction::custom;
      function = adds ? reduce_bfloat16<add_bfloat16> : reduce_bfloat16<multiply_bfloat16>;
    } else if (bf16 == Bf16Reduction::as_float32) {
      values = values.to(at::kFloat);
    }
  }
  return {values, how, function, op == ReduceOp::AVG ? static_cast<double>(size) : 1.0};
}

// Copies reduced values to the caller's tensor.
void copy_back(const Tensor& target, Tensor values, double divisor) {
  if (divisor != 1.0) {
    values.div_(divisor);
  }
  if (values.data_ptr() == target.data_ptr()) {
    return;
  }
  if (target.is_complex()) {
    values = at::view_as_complex(values);
  }
  target.copy_(values.view(target.sizes()));
}

std::vector<size_t> sizes_of(const Tensors& tensors) {
  std::vector<size_t> sizes;
  for (const auto& tensor : tensors) {
    sizes.push_back(tensor.nbytes());
  }
  return sizes;
}

Tensors contiguous(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) {
    made.push_back(tensor.contiguous());
  }
  return made;
}

std::vector<void*> addresses_of(const Tensors& tensors) {
  std::vector<void*> addresses;
  for (const auto& tensor : tensors) {
    addresses.push_back(tensor.data_ptr());
  }
  return addresses;
}

// Returns a function that copies the buffers to the caller's tensors, unless they are the same memory.
std::function<void()> copier(Tensors targets, Tensors buffers) {
  return [targets = std::move(targets), buffers = std::move(buffers)] {
    for (size_t i = 0; i < targets.size(); i++) {
      if (!targets[i].is_same(buffers[i]) && targets[i].data_ptr() != buffers[i].data_ptr()) {
        targets[i].copy_(buffers[i]);
      }
    }
  };
}

Events one(ccl::event event) {
  Events events;
  events.push_back(std::move(event));
  return events;
}

std::string shape_of(const Tensors& tensors) {
  std::string text;
  for (const auto& tensor : tensors) {
    text += (text.empty() ? "" : ", ") + c10::str(tensor.scalar_type(), tensor.sizes());
  }
  return text;
}

// The key-value store through which the ranks of a communicator exchange addresses: the job's c10d store.
class StoreKvs : public ccl::kvs_interface {
 public:
  StoreKvs(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout)
      : store_(std::move(store)), timeout_(timeout), deadline_(Clock::now() + timeout) {}

  // Returns nothing for a key that is not set yet; oneCCL retries until all ranks have joined.
  ccl::vector_class<char> get(const ccl::string_class& key) override {
    TORCH_CHECK(
        left_ || Clock::now() < deadline_, "ccl: Timed out after ", timeout_.count() / 1000.0,
        " s while a group was created: not all of its ranks joined");
    const auto name = "kvs/" + std::string(key.c_str());
    if (left_ || !store_->check({name})) {
      return {};
    }
    const auto value = store_->get(name);
    return {value.begin(), value.end()};
  }

  void set(const ccl::string_class& key, const ccl::vector_class<char>& data) override {
    if (!left_) {
      store_->set("kvs/" + std::string(key.c_str()), std::vector<uint8_t>(data.begin(), data.end()));
    }
  }

  // A communicator clears its entries when it is destroyed; the store may be closed by then.
  void leave() { left_ = true; }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_;
  std::atomic<bool> left_{false};
};

}  // namespace

class CclBackend : public c10d::Backend {
 public:
  CclBackend(
      c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout, std::string name)
      : Backend(rank, size),
        kvs_(std::make_shared<StoreKvs>(store, timeout)),
        name_(std::move(name)),
        process_(getpid()),
        options_(c10::make_intrusive<Options>("ccl", timeout)) {
    const auto lock = Engine::instance().enter();
    Engine::instance().publish({"the creation of group " + name_, 0, Clock::now() + timeout});
    ccl::init();
    comm_ = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, kvs_));
    uint8_t all_have_bf16 = __builtin_cpu_supports("avx512bf16") ? 1 : 0;
    ccl::allreduce(&all_have_bf16, &all_have_bf16, 1, ccl::datatype::uint8, ccl::reduction::min, *comm_).wait();
    const char* transport = std::getenv("CCL_ATL_TRANSPORT");
    const bool over_ofi = transport != nullptr && std::string(transport) == "ofi";
    bf16_reduction_ = all_have_bf16 ? Bf16Reduction::oneccl : Bf16Reduction::as_float32;
    bf16_allreduce_ = over_ofi ? Bf16Reduction::own : bf16_reduction_;
    Engine::instance().publish_oldest();
    Engine::instance().register_exit_handler();
  }

  // A communicator with operations that never end cannot be destroyed: it is leaked.
  ~CclBackend() override {
    std::optional<pybind11::gil_scoped_release> released;  // oneCCL may wait for other ranks here
    if (Py_IsInitialized() && PyGILState_Check()) {
      released.emplace();
    }
    kvs_->leave();
    if (Engine::instance().idle() && getpid() == process_) {
      const auto lock = Engine::instance().enter();
      Engine::instance().publish({"the destruction of group " + name_, sequence_, Clock::now() + options_->timeout});
      comm_.reset();
      Engine::instance().publish_oldest();
    } else {
      static_cast<void>(comm_.release());
    }
  }

  const std::string getBackendName() const override { return "ccl"; }
  // torch 2.8 has no virtual functions of these two names.
  c10::intrusive_ptr<Options> getBackendOptions() { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override { Engine::instance().abort("ccl: aborted"); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    check_one(tensors);
    return reduce_all(OpType::ALLREDUCE, tensors, opts.reduceOp, opts.timeout);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return reduce_all(OpType::ALLREDUCE_COALESCED, tensors, opts.reduceOp, opts.timeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    check_one(tensors);
    check_dense(tensors);
    const auto buffer = tensors[0].contiguous();
    return submit(
        OpType::BROADCAST, tensors, opts.timeout, tensors,
        [=, this] {
          return one(ccl::broadcast(
              buffer.data_ptr(), buffer.nbytes(), ccl::datatype::uint8, static_cast<int>(opts.rootRank), *comm_));
        },
        copier(tensors, {buffer}));
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    check_one(tensors);
    check_dense(tensors);
    const auto tensor = tensors[0];
    const auto plan = reduction_of(tensor, opts.reduceOp, size_, bf16_reduction_);
    const bool receives = rank_ == opts.rootRank;
    const auto result = receives ? plan.values : at::empty_like(plan.values);
    return submit(
        OpType::REDUCE, tensors, opts.timeout, tensors,
        [=, this] {
          return one(ccl::reduce(
              plan.values.data_ptr(), result.data_ptr(), plan.values.numel(), datatype_of(plan.values.scalar_type()),
              plan.op, static_cast<int>(opts.rootRank), *comm_));
        },
        [=] {
          if (receives) {
            copy_back(tensor, result, plan.divisor);
          }
        });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    check_one(inputs);
    TORCH_CHECK(outputs.size() == 1, "all_gather takes one list of outputs, found ", outputs.size());
    return gather_lists(OpType::ALLGATHER, outputs, inputs, opts.timeout);
  }

  WorkPtr allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    std::vector<Tensors> by_input(inputs.size());
    for (const auto& of_rank : outputs) {
      TORCH_CHECK(of_rank.size() == inputs.size(), "all_gather_coalesced needs one output per input for each rank");
      for (size_t i = 0; i < inputs.size(); i++) {
        by_input[i].push_back(of_rank[i]);
      }
    }
    return gather_lists(OpType::ALLGATHER_COALESCED, by_input, inputs, opts.timeout);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    return gather_into(OpType::_ALLGATHER_BASE, {output}, {input}, opts.timeout);
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return gather_into(OpType::COALESCED, outputs, inputs, opts.timeout);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    check_one(inputs);
    const bool receives = rank_ == opts.rootRank;
    TORCH_CHECK(
        receives ? outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(size_) : outputs.empty(),
        "gather needs a list of ", size_, " output tensors on the root and none on other ranks");
    return exchange(
        OpType::GATHER, receives ? outputs[0] : Tensors(size_), only(inputs[0], opts.rootRank), opts.timeout);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    check_one(outputs);
    const bool sends = rank_ == opts.rootRank;
    TORCH_CHECK(
        sends ? inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(size_) : inputs.empty(),
        "scatter needs a list of ", size_, " input tensors on the root and none on other ranks");
    return exchange(
        OpType::SCATTER, only(outputs[0], opts.rootRank), sends ? inputs[0] : Tensors(size_), opts.timeout);
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    check_one(outputs);
    TORCH_CHECK(
        inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(size_),
        "reduce_scatter needs a list of ", size_, " input tensors");
    for (const auto& input : inputs[0]) {
      check_dense(input);
      TORCH_CHECK(
          input.numel() == outputs[0].numel() && input.scalar_type() == outputs[0].scalar_type(),
          "reduce_scatter needs tensors of one size and type, found ", shape_of(inputs[0]), " for ",
          shape_of(outputs));
    }
    Tensors flat;
    for (const auto& input : inputs[0]) {
      flat.push_back(input.reshape({-1}));
    }
    return scatter_sums(OpType::REDUCE_SCATTER, outputs, {at::cat(flat)}, opts.reduceOp, opts.timeout);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return scatter_sums(OpType::_REDUCE_SCATTER_BASE, {output}, {input}, opts.reduceOp, opts.timeout);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return scatter_sums(OpType::COALESCED, outputs, inputs, opts.reduceOp, opts.timeout);
  }

  WorkPtr alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_rows, std::vector<int64_t>& input_rows,
      const c10d::AllToAllOptions& opts) override {
    check_dense({output, input});
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "all_to_all needs inputs and outputs of one type");
    const auto from = input.contiguous();
    const auto to = output.contiguous();
    return exchange_bytes(
        OpType::ALLTOALL_BASE, {output}, {to}, {from}, parts(to, output_rows), parts(from, input_rows), opts.timeout);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    TORCH_CHECK(
        outputs.size() == static_cast<size_t>(size_) && inputs.size() == static_cast<size_t>(size_),
        "all_to_all needs ", size_, " outputs and ", size_, " inputs");
    return exchange(OpType::ALLTOALL, outputs, inputs, opts.timeout);
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    check_point_to_point(tensors, to);
    const auto message = at::cat({header_of(tensors[0], tag), bytes_of(tensors[0].contiguous())});
    return submit(
        OpType::SEND, tensors, c10d::kUnsetTimeout, tensors,
        [=, this] { return one(ccl::send(message.data_ptr(), message.nbytes(), ccl::datatype::uint8, to, *comm_)); },
        [] {});
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    check_point_to_point(tensors, from);
    const auto wanted = header_of(tensors[0], tag);
    const auto message = at::empty({wanted.numel() + static_cast<int64_t>(tensors[0].nbytes())}, at::kByte);
    return submit(
        OpType::RECV, tensors, c10d::kUnsetTimeout, tensors,
        [=, this] { return one(ccl::recv(message.data_ptr(), message.nbytes(), ccl::datatype::uint8, from, *comm_)); },
        [tensor = tensors[0], wanted, message, tag, from] {
          const auto* found = static_cast<const int64_t*>(message.const_data_ptr());
          TORCH_CHECK(
              message.slice(0, 0, wanted.numel()).equal(wanted), "recv of ", tensor.nbytes(), " bytes with tag ", tag,
              " from rank ", from, " met ", found[1], " bytes with tag ", found[0],
              ": oneCCL delivers messages in the order in which they were sent");
          const auto whole = at::empty(tensor.sizes(), tensor.options());
          bytes_of(whole).copy_(message.slice(0, wanted.numel()));
          tensor.copy_(whole);
        });
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    const auto token = at::zeros({1}, at::kByte);
    return submit(
        OpType::BARRIER, {}, opts.timeout, {},
        [=, this] {
          return one(ccl::allreduce(
              token.data_ptr(), token.data_ptr(), 1, ccl::datatype::uint8, ccl::reduction::max, *comm_));
        },
        [] {});
  }

 private:
  WorkPtr submit(
      OpType type, const Tensors& described, std::chrono::milliseconds timeout, Tensors outputs,
      std::function<Events()> launch, std::function<void()> finish) {
    TORCH_CHECK(
        getpid() == process_,
        "this process was forked after the ccl group was created, which oneCCL and MPI do not support: use threads, or "
        "start processes with the spawn method before the group");
    const auto number = ++sequence_;
    auto operation = c10::make_intrusive<Operation>(
        rank_, type, "ccl:" + c10d::opTypeToString(type),
        c10::str(c10d::opTypeToString(type), " #", number, " of group ", name_, " (", shape_of(described), ")"), number,
        timeout == c10d::kUnsetTimeout ? options_->timeout : timeout, std::move(outputs));
    Engine::instance().submit(operation, std::move(launch), std::move(finish));
    return operation;
  }

  WorkPtr reduce_all(OpType type, const Tensors& tensors, ReduceOp::RedOpType op, std::chrono::milliseconds timeout) {
    check_dense(tensors);
    if (op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR) {
      return reduce_bits(type, tensors, op, timeout);
    }
    std::vector<Reduction> plans;
    for (const auto& tensor : tensors) {
      plans.push_back(reduction_of(tensor, op, size_, bf16_allreduce_));
    }
    return submit(
        type, tensors, timeout, tensors,
        [=, this] {
          Events events;
          for (const auto& plan : plans) {
            events.push_back(ccl::allreduce(
                plan.values.data_ptr(), plan.values.data_ptr(), plan.values.numel(),
                datatype_of(plan.values.scalar_type()), plan.op, *comm_, plan.attributes()));
          }
          return events;
        },
        [=] {
          for (size_t i = 0; i < tensors.size(); i++) {
            copy_back(tensors[i], plans[i].values, plans[i].divisor);
          }
        });
  }

  // oneCCL has no bitwise reductions: the values of all ranks are gathered and reduced here.
  WorkPtr reduce_bits(OpType type, const Tensors& tensors, ReduceOp::RedOpType op, std::chrono::milliseconds timeout) {
    Tensors sent, gathered;
    for (const auto& tensor : tensors) {
      TORCH_CHECK(at::isIntegralType(tensor.scalar_type(), true), "ccl reduces only integers and booleans bitwise");
      sent.push_back(tensor.contiguous());
      gathered.push_back(at::empty({size_, tensor.numel()}, tensor.options()));
    }
    return submit(
        type, tensors, timeout, tensors,
        [=, this] {
          Events events;
          for (size_t i = 0; i < sent.size(); i++) {
            events.push_back(ccl::allgatherv(
                sent[i].data_ptr(), sent[i].nbytes(), gathered[i].data_ptr(),
                std::vector<size_t>(size_, sent[i].nbytes()), ccl::datatype::uint8, *comm_));
          }
          return events;
        },
        [=, this] {
          for (size_t i = 0; i < tensors.size(); i++) {
            auto result = gathered[i][0];
            for (int rank = 1; rank < size_; rank++) {
              const auto other = gathered[i][rank];
              result = op == ReduceOp::BAND ? result.bitwise_and(other)
                       : op == ReduceOp::BOR ? result.bitwise_or(other)
                                             : result.bitwise_xor(other);
            }
            tensors[i].copy_(result.view(tensors[i].sizes()));
          }
        });
  }

  // Gathers input i of every rank into outputs[i], which has one tensor per rank.
  WorkPtr gather_lists(
      OpType type, const std::vector<Tensors>& outputs, const Tensors& inputs, std::chrono::milliseconds timeout) {
    check_dense(inputs);
    Tensors sent = contiguous(inputs), targets;
    std::vector<Tensors> received;
    for (size_t i = 0; i < inputs.size(); i++) {
      TORCH_CHECK(
          outputs[i].size() == static_cast<size_t>(size_), "all_gather needs ", size_, " outputs, found ",
          outputs[i].size());
      check_dense(outputs[i]);
      for (const auto& output : outputs[i]) {
        TORCH_CHECK(output.scalar_type() == inputs[i].scalar_type(), "all_gather needs inputs and outputs of one type");
      }
      TORCH_CHECK(
          outputs[i][rank_].numel() == inputs[i].numel(), "all_gather: output ", rank_, " holds ",
          outputs[i][rank_].numel(), " values, this rank's input ", inputs[i].numel());
      received.push_back(contiguous(outputs[i]));
      targets.insert(targets.end(), outputs[i].begin(), outputs[i].end());
    }
    return submit(
        type, inputs, timeout, targets,
        [=, this] {
          Events events;
          for (size_t i = 0; i < sent.size(); i++) {
            events.push_back(ccl::allgatherv(
                sent[i].data_ptr(), sent[i].nbytes(), addresses_of(received[i]), sizes_of(received[i]),
                ccl::datatype::uint8, *comm_));
          }
          return events;
        },
        [=] {
          for (size_t i = 0; i < sent.size(); i++) {
            copier(outputs[i], received[i])();
          }
        });
  }

  WorkPtr gather_into(
      OpType type, const Tensors& outputs, const Tensors& inputs, std::chrono::milliseconds timeout) {
    check_pairs("all_gather_into_tensor", outputs, inputs);
    const auto sent = contiguous(inputs), received = contiguous(outputs);
    return submit(
        type, inputs, timeout, outputs,
        [=, this] {
          Events events;
          for (size_t i = 0; i < sent.size(); i++) {
            events.push_back(ccl::allgatherv(
                sent[i].data_ptr(), sent[i].nbytes(), received[i].data_ptr(),
                std::vector<size_t>(size_, sent[i].nbytes()), ccl::datatype::uint8, *comm_));
          }
          return events;
        },
        copier(outputs, received));
  }

  WorkPtr scatter_sums(
      OpType type, const Tensors& outputs, const Tensors& inputs, ReduceOp::RedOpType op,
      std::chrono::milliseconds timeout) {
    check_pairs("reduce_scatter_tensor", inputs, outputs);
    std::vector<Reduction> plans;
    Tensors results;
    for (const auto& input : inputs) {
      plans.push_back(reduction_of(input, op, size_, bf16_reduction_));
      results.push_back(at::empty({plans.back().values.numel() / size_}, plans.back().values.options()));
    }
    return submit(
        type, inputs, timeout, outputs,
        [=, this] {
          Events events;
          for (size_t i = 0; i < plans.size(); i++) {
            events.push_back(ccl::reduce_scatter(
                plans[i].values.data_ptr(), results[i].data_ptr(), results[i].numel(),
                datatype_of(results[i].scalar_type()), plans[i].op, *comm_));
          }
          return events;
        },
        [=] {
          for (size_t i = 0; i < plans.size(); i++) {
            auto shape = outputs[i].sizes().vec();
            if (outputs[i].is_complex()) {
              shape.push_back(2);
            }
            copy_back(outputs[i], results[i].view(shape), plans[i].divisor);
          }
        });
  }

  // Checks that there is one whole tensor per part, each with the group's size times the values of its part.
  void check_pairs(const char* what, const Tensors& wholes, const Tensors& parts) const {
    check_dense(wholes);
    check_dense(parts);
    TORCH_CHECK(
        !wholes.empty() && wholes.size() == parts.size(), what, ": needs as many outputs as inputs, found ",
        wholes.size(), " and ", parts.size());
    for (size_t i = 0; i < wholes.size(); i++) {
      TORCH_CHECK(
          wholes[i].scalar_type() == parts[i].scalar_type() && wholes[i].numel() == parts[i].numel() * size_, what,
          ": one tensor must have ", size_, " times the values of the other, found ", shape_of({wholes[i]}), " and ",
          shape_of({parts[i]}));
    }
  }

  // A list with a tensor for one rank and undefined tensors for all others.
  Tensors only(const Tensor& tensor, int64_t rank) const {
    Tensors tensors(size_);
    tensors[rank] = tensor;
    return tensors;
  }

  // Sends tensor i of `inputs` to rank i and receives tensor i of `outputs` from it; undefined tensors are skipped.
  WorkPtr exchange(OpType type, const Tensors& outputs, const Tensors& inputs, std::chrono::milliseconds timeout) {
    Tensors targets, received, sent;
    std::vector<size_t> receive, give;
    for (int rank = 0; rank < size_; rank++) {
      receive.push_back(0);
      give.push_back(0);
      if (outputs[rank].defined()) {
        check_dense(outputs[rank]);
        targets.push_back(outputs[rank]);
        receive.back() = outputs[rank].nbytes();
      }
      if (inputs[rank].defined()) {
        check_dense(inputs[rank]);
        sent.push_back(bytes_of(inputs[rank].contiguous()).clone());
        give.back() = inputs[rank].nbytes();
      }
    }
    const auto from = sent.empty() ? at::empty({0}, at::kByte) : at::cat(sent);
    const auto to = at::empty(
        {static_cast<int64_t>(std::accumulate(receive.begin(), receive.end(), size_t{0}))}, at::kByte);
    int64_t start = 0;
    for (const auto& target : targets) {
      const auto end = start + static_cast<int64_t>(target.nbytes());
      received.push_back(to.slice(0, start, end));
      start = end;
    }
    return submit(
        type, sent_or_received(inputs, outputs), timeout, targets,
        [=, this] {
          return one(ccl::alltoallv(
              from.data_ptr(), give, to.data_ptr(), receive, ccl::datatype::uint8, *comm_));
        },
        [=] {
          for (size_t i = 0; i < targets.size(); i++) {
            const auto whole = at::empty(targets[i].sizes(), targets[i].options());
            bytes_of(whole).copy_(received[i]);
            targets[i].copy_(whole);
          }
        });
  }

  WorkPtr exchange_bytes(
      OpType type, const Tensors& outputs, const Tensors& to, const Tensors& from, const std::vector<size_t>& receive,
      const std::vector<size_t>& give, std::chrono::milliseconds timeout) {
    return submit(
        type, from, timeout, outputs,
        [=, this] {
          return one(ccl::alltoallv(
              from[0].data_ptr(), give, to[0].data_ptr(), receive, ccl::datatype::uint8, *comm_));
        },
        copier(outputs, to));
  }

  static Tensors sent_or_received(const Tensors& inputs, const Tensors& outputs) {
    Tensors described;
    for (const auto& tensor : inputs) {
      if (tensor.defined()) {
        described.push_back(tensor);
      }
    }
    for (const auto& tensor : outputs) {
      if (described.empty() && tensor.defined()) {
        described.push_back(tensor);
      }
    }
    return described;
  }

  // The bytes of each rank's rows of a contiguous tensor; equal parts without `rows`.
  std::vector<size_t> parts(const Tensor& tensor, const std::vector<int64_t>& rows) const {
    const auto all = tensor.dim() == 0 ? 1 : tensor.size(0);
    if (rows.empty()) {
      TORCH_CHECK(all % size_ == 0, "all_to_all: ", all, " rows cannot be split into ", size_, " equal parts");
      return std::vector<size_t>(size_, tensor.nbytes() / size_);
    }
    TORCH_CHECK(
        rows.size() == static_cast<size_t>(size_) && std::accumulate(rows.begin(), rows.end(), int64_t{0}) == all,
        "all_to_all: needs ", size_, " split sizes with a sum of ", all);
    const auto row = all == 0 ? 0 : tensor.nbytes() / all;
    std::vector<size_t> bytes;
    for (const auto count : rows) {
      bytes.push_back(count * row);
    }
    return bytes;
  }

  void check_point_to_point(const Tensors& tensors, int other) const {
    check_one(tensors);
    check_dense(tensors);
    TORCH_CHECK(other != rank_, "rank ", rank_, " can neither send to nor receive from itself");
  }

  // oneCCL's messages have no tag: this header with the tag and the number of bytes precedes the data.
  static Tensor header_of(const Tensor& tensor, int tag) {
    return at::tensor({static_cast<int64_t>(tag), static_cast<int64_t>(tensor.nbytes())}, at::kLong).view(at::kByte);
  }

  const std::shared_ptr<StoreKvs> kvs_;
  const std::string name_;
  const pid_t process_;
  const c10::intrusive_ptr<Options> options_;
  std::unique_ptr<ccl::communicator> comm_;
  Bf16Reduction bf16_reduction_;
  Bf16Reduction bf16_allreduce_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace cputrain

PYBIND11_MODULE(cputrain_ccl, module) {
  namespace py = pybind11;
  using cputrain::CclBackend;
  py::class_<CclBackend, c10d::Backend, c10::intrusive_ptr<CclBackend>>(module, "CclBackend")
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, double timeout_s,
                      const std::string& name) {
            const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
            return c10::make_intrusive<CclBackend>(store, rank, size, timeout, name);
          }),
          py::call_guard<py::gil_scoped_release>());
  // The oldest collective in flight ("": none), its number, and by how many seconds it is past its timeout.
  module.def("pending_collective", [] {
    const auto current = cputrain::Engine::instance().current();
    const std::chrono::duration<double> overdue = cputrain::Clock::now() - current.deadline;
    return std::make_tuple(current.collective, current.sequence, current.collective.empty() ? 0.0 : overdue.count());
  });
  module.def("set_absent_ranks", [](std::string absent) {
    cputrain::Engine::instance().set_absent_ranks(std::move(absent));
  });
  module.def(
      "abort", [](const std::string& reason) { cputrain::Engine::instance().abort(reason); },
      py::call_guard<py::gil_scoped_release>());
}
