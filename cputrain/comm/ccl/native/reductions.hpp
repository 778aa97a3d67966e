// A reduction as oneCCL carries it out: PyTorch's types and operators brought into its form, and the result back.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "tensors.hpp"

namespace cputrain {

// Who adds and multiplies bfloat16 values: bfloat16.hpp, oneCCL, or oneCCL after widening them to float32.
enum class Bf16Reduction { own, oneccl, as_float32 };

// A tensor in the form in which it is reduced, the reduction, and the divisor of the result.
struct Reduction {
  Tensor values;
  ccl::reduction op;
  ccl::reduction_fn function;  // set where op is custom
  double divisor;

  ccl::allreduce_attr attributes() const;
};

const char* name_of(c10d::ReduceOp::RedOpType op);

// Converts a tensor for a reduction over `size` ranks: complex numbers become pairs, booleans 0 and 1.
Reduction reduction_of(const Tensor& tensor, c10d::ReduceOp::RedOpType op, int size, Bf16Reduction bf16);

// Copies reduced values to the caller's tensor.
void copy_back(const Tensor& target, Tensor values, double divisor);

}  // namespace cputrain
