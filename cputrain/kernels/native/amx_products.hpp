// Products of bfloat16 matrices on AMX whose first one is stored by columns, as in weight gradients: torch's take 1.0
// to 3 times as long as transposing a matrix first, if the product has at least 256 rows or columns.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <algorithm>

#include "operator_kernels.hpp"
#include "operators.hpp"

namespace {

constexpr int64_t kMinShorter = 16;   // rows or columns of the product
constexpr int64_t kMinLonger = 256;   // the same, of which there are more
constexpr int64_t kMinProducts = 64;  // that are summed

Kernel amx_kernel("bfloat16 on AMX");

Tensor transposed(const Tensor& matrix) {
  const Tensor rows = matrix.stride(1) == 1 ? matrix : matrix.contiguous();
  Tensor columns = at::empty({rows.size(1), rows.size(0)}, rows.options());
  transpose_halves(rows.const_data_ptr(), rows.size(0), rows.size(1), rows.stride(0), at::get_num_threads(),
                   columns.mutable_data_ptr());
  return columns;
}

// The product of the transposed (M, N) matrix `a` and `b` (M, K): of `a`, or of `b` and the result, what has fewer
// values is transposed.
Tensor product_of_transposed(const Tensor& a, const Tensor& b) {
  const bool first = a.numel() <= b.numel() + a.size(1) * b.size(1);
  return first ? at::cpu::mm(transposed(a), b) : transposed(at::cpu::mm(transposed(b), a));
}

// Whether a product of this many rows and columns is faster so.
bool is_large(int64_t rows, int64_t columns) {
  return std::min(rows, columns) >= kMinShorter && std::max(rows, columns) >= kMinLonger;
}

// Whether `a` is the transpose of a matrix with dense rows, large enough to be transposed first.
bool is_stored_by_columns(const Tensor& a, const Tensor& b) {
  return amx_kernel.on && a.dim() == 2 && b.dim() == 2 && is_dense(a) && is_dense(b) &&
         a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16 && a.size(1) == b.size(0) &&
         a.stride(0) == 1 && a.stride(1) >= a.size(0) && is_large(a.size(0), b.size(1)) && a.size(1) >= kMinProducts;
}

}  // namespace
