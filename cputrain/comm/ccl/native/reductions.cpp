#include "reductions.hpp"

#include <ATen/Functions.h>

#include "bfloat16.hpp"

namespace cputrain {

using c10d::ReduceOp;

ccl::allreduce_attr Reduction::attributes() const {
  auto made = ccl::create_operation_attr<ccl::allreduce_attr>();
  if (function != nullptr) {
    made.set<ccl::allreduce_attr_id::reduction_fn>(function);
  }
  return made;
}

const char* name_of(ReduceOp::RedOpType op) {
  static const char* names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused"};
  return names[op];
}

namespace {

void check_operator(const Tensor& tensor, ReduceOp::RedOpType op, bool adds) {
  CPUTRAIN_REQUIRE(
      op <= ReduceOp::MAX, "ccl cannot reduce by ", name_of(op), " here: use sum, avg, product, min or max");
  CPUTRAIN_REQUIRE(
      !tensor.is_complex() || adds, "ccl cannot reduce complex numbers by ", name_of(op),
      ": reduce their real and imaginary parts");
  CPUTRAIN_REQUIRE(
      op != ReduceOp::AVG || tensor.is_floating_point() || tensor.is_complex(),
      "ccl cannot average ", tensor.scalar_type(), ": use sum, then divide with the rounding you need");
}

}  // namespace

Reduction reduction_of(const Tensor& tensor, ReduceOp::RedOpType op, int size, Bf16Reduction bf16) {
  const auto type = tensor.scalar_type();
  const bool adds = op == ReduceOp::SUM || op == ReduceOp::AVG;
  check_operator(tensor, op, adds);
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
  datatype_of(values.scalar_type());  // throws in the call; an error at a deferred start would end the group
  return {values, how, function, op == ReduceOp::AVG ? static_cast<double>(size) : 1.0};
}

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

}  // namespace cputrain
