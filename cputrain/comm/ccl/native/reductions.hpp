// Converts PyTorch's types and reduction operators to oneCCL's, and results back.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "tensors.hpp"

namespace cputrain {

// How bfloat16 values are added and multiplied: by bfloat16.hpp, by oneCCL, or by oneCCL as float32.
enum class Bf16Reduction { own, oneccl, as_float32 };

// A tensor converted for oneCCL, the reduction, and the divisor of the result.
struct Reduction {
  Tensor values;
  ccl::reduction op;
  ccl::reduction_fn function;  // set if op is custom
  double divisor;

  ccl::allreduce_attr attributes() const;
};

const char* name_of(c10d::ReduceOp::RedOpType op);

// Prepares the reduction of a tensor over `size` ranks: complex numbers become pairs, booleans 0 and 1.
Reduction reduction_of(const Tensor& tensor, c10d::ReduceOp::RedOpType op, int size, Bf16Reduction bf16);

// Copies reduced values to the caller's tensor.
void copy_back(const Tensor& target, Tensor values, double divisor);

}  // namespace cputrain
