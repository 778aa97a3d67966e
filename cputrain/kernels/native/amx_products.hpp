// Products of bfloat16 matrices on AMX whose first one is stored by columns, as in weight gradients: torch's take 1.5
// to 2.6 times as long as transposing it first.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include "operator_kernels.hpp"
#include "operators.hpp"

namespace {

constexpr int64_t kMinRows = 16;      // of the product
constexpr int64_t kMinColumns = 32;
constexpr int64_t kMinProducts = 64;  // that are summed

Kernel amx_kernel("bfloat16 on AMX");

// The product of the transposed (M, N) matrix `a`, whose rows are dense, and `b` (M, K).
Tensor product_of_transposed(const Tensor& a, const Tensor& b) {
  const Tensor rows = a.stride(1) == 1 ? a : a.contiguous();
  Tensor columns = at::empty({a.size(1), a.size(0)}, a.options());
  transpose_halves(rows.const_data_ptr(), rows.size(0), rows.size(1), rows.stride(0), at::get_num_threads(),
                   columns.mutable_data_ptr());
  return at::cpu::mm(columns, b);
}

// Whether `a` is the transpose of a matrix with dense rows, large enough to be transposed first.
bool is_stored_by_columns(const Tensor& a, const Tensor& b) {
  return amx_kernel.on && a.dim() == 2 && b.dim() == 2 && is_dense(a) && is_dense(b) &&
         a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16 && a.size(1) == b.size(0) &&
         a.stride(0) == 1 && a.stride(1) >= a.size(0) && a.size(0) >= kMinRows && b.size(1) >= kMinColumns &&
         a.size(1) >= kMinProducts;
}

}  // namespace
