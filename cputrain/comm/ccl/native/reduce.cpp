// Collectives that reduce: all-reduce, reduce, reduce-scatter.
#include <ATen/Functions.h>

#include "backend.hpp"

namespace cputrain {

using c10d::OpType;
using c10d::ReduceOp;

namespace {

bool is_bitwise(RedOpType op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

}  // namespace

WorkPtr CclBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  check_one(tensors);
  if (tensors[0].is_sparse()) {
    return reduce_sparse(tensors[0], opts.reduceOp, opts.timeout);
  }
  return reduce_all(OpType::ALLREDUCE, tensors, opts.reduceOp, opts.timeout);
}

WorkPtr CclBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

WorkPtr CclBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return reduce_all(OpType::ALLREDUCE_COALESCED, tensors, opts.reduceOp, opts.timeout);
}

WorkPtr CclBackend::reduce_all(OpType type, const Tensors& tensors, RedOpType op, Milliseconds timeout) {
  check_dense(tensors);
  if (is_bitwise(op)) {
    return reduce_bits(type, tensors, op, timeout);
  }
  std::vector<Reduction> plans;
  for (const auto& tensor : tensors) {
    plans.push_back(reduction_of(tensor, op, size_, bf16_allreduce_));
  }
  return submit(
      type, tensors, agreement_of(tensors, op), timeout, tensors,
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

WorkPtr CclBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  check_one(tensors);
  check_dense(tensors);
  const auto tensor = tensors[0];
  const bool receives = rank_ == opts.rootRank;
  if (is_bitwise(opts.reduceOp)) {
    return reduce_bits(OpType::REDUCE, tensors, opts.reduceOp, opts.timeout, opts.rootRank);
  }
  const auto plan = reduction_of(tensor, opts.reduceOp, size_, bf16_reduction_);
  const auto result = receives ? plan.values : at::empty_like(plan.values);
  auto agreement = agreement_of(tensors, opts.reduceOp);
  add_root(agreement, opts.rootRank);
  return submit(
      OpType::REDUCE, tensors, std::move(agreement), opts.timeout, tensors,
      [=, this] {
        Events events;
        events.push_back(ccl::reduce(
            plan.values.data_ptr(), result.data_ptr(), plan.values.numel(), datatype_of(plan.values.scalar_type()),
            plan.op, static_cast<int>(opts.rootRank), *comm_));
        return events;
      },
      [=] {
        if (receives) {
          copy_back(tensor, result, plan.divisor);
        }
      });
}

WorkPtr CclBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
  check_one(outputs);
  CPUTRAIN_REQUIRE(
      inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(size_), "reduce_scatter needs a list of ", size_,
      " input tensors");
  Tensors flat;
  for (const auto& input : inputs[0]) {
    check_dense(input);
    CPUTRAIN_REQUIRE(
        input.numel() == outputs[0].numel() && input.scalar_type() == outputs[0].scalar_type(),
        "reduce_scatter needs tensors of one size and type, found ", shape_of(inputs[0]), " for ", shape_of(outputs));
    flat.push_back(input.reshape({-1}));
  }
  return scatter_sums(OpType::REDUCE_SCATTER, outputs, {at::cat(flat)}, opts.reduceOp, opts.timeout);
}

WorkPtr CclBackend::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) {
  return scatter_sums(OpType::_REDUCE_SCATTER_BASE, {output}, {input}, opts.reduceOp, opts.timeout);
}

WorkPtr CclBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return scatter_sums(OpType::COALESCED, outputs, inputs, opts.reduceOp, opts.timeout);
}

WorkPtr CclBackend::scatter_sums(
    OpType type, const Tensors& outputs, const Tensors& inputs, RedOpType op, Milliseconds timeout) {
  check_pairs("reduce_scatter_tensor", inputs, outputs);
  if (is_bitwise(op)) {
    return scatter_bits(type, outputs, inputs, op, timeout);
  }
  std::vector<Reduction> plans;
  Tensors results;
  for (const auto& input : inputs) {
    plans.push_back(reduction_of(input, op, size_, bf16_reduction_));
    results.push_back(at::empty({plans.back().values.numel() / size_}, plans.back().values.options()));
  }
  return submit(
      type, inputs, agreement_of(inputs, op), timeout, outputs,
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

}  // namespace cputrain
