// Products of matrices and attention's gradients in bfloat16. On CPUs without AVX-512, where torch leaves oneDNN, they
// are computed in float32 and rounded once; on AMX a first matrix that is stored by columns is transposed.

#pragma once

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include "attention_operators.hpp"
#include "operators.hpp"

namespace {

Kernel float32_kernel("bfloat16 in float32");

// Whether all are bfloat16 that torch would compute without oneDNN.
template <typename... Values>
bool in_float32(const Values&... values) {
  return float32_kernel.on && (is_slow(values) && ...);
}

Tensor mm(const Tensor& a, const Tensor& b) {
  if (is_stored_by_columns(a, b)) {
    const Call call(amx_kernel);
    return product_of_transposed(a.t(), b);
  }
  if (!in_float32(a, b)) return at::cpu::mm(a, b);
  const Call call(float32_kernel);
  return narrow(at::cpu::mm(wide(a), wide(b)));
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  if (!in_float32(a, b)) return at::cpu::bmm(a, b);
  const Call call(float32_kernel);
  return narrow(at::cpu::bmm(wide(a), wide(b)));
}

Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  if (!in_float32(a, b, c)) return at::cpu::addmm(c, a, b, beta, alpha);
  const Call call(float32_kernel);
  return narrow(at::cpu::addmm(wide(c), wide(a), wide(b), beta, alpha));
}

Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  if (!in_float32(a, b, c)) return at::cpu::baddbmm(c, a, b, beta, alpha);
  const Call call(float32_kernel);
  return narrow(at::cpu::baddbmm(wide(c), wide(a), wide(b), beta, alpha));
}

Gradients attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor& out, const Tensor& logsumexp, double dropout, bool causal,
                             const std::optional<Tensor>& mask, std::optional<double> scale) {
  if (is_attention_covered(grad, query, key, value, out, logsumexp, dropout, mask)) {
    const Call call(amx_kernel);
    return attention_gradients(grad, query, key, value, out, logsumexp, causal, scale);
  }
  const auto by_torch = at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward;
  if (!in_float32(grad, query, key, value, out)) {
    return by_torch(grad, query, key, value, out, logsumexp, dropout, causal, mask, scale);
  }
  const Call call(float32_kernel);
  const bool narrow_mask = mask.has_value() && mask->defined() && mask->scalar_type() == at::kBFloat16;
  auto [q, k, v] = by_torch(wide(grad), wide(query), wide(key), wide(value), wide(out), logsumexp, dropout, causal,
                            narrow_mask ? wide(mask) : mask, scale);
  return {narrow(q), narrow(k), narrow(v)};
}

}  // namespace
