// Convolutions of one tap as products of matrices, for which oneDNN's convolutions take longer on Intel's CPUs with
// AVX-512: input gradients in float32 1.04 to 2.2 times, outputs 1.0 to 1.4 times; in bfloat16 on AMX both 1.05 to 2
// times if images are small, weight gradients 0.95 to 3.2 times from 256 channels on. Images are channels-last, so that
// places are rows.

#pragma once

#include <ATen/Context.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/version.h>

#include "amx_products.hpp"
#include "depthwise_operators.hpp"

namespace {

constexpr int64_t kMaxImage = 28 * 28;  // places of an image, and of all, of which bfloat16 products are faster
constexpr int64_t kMaxPlaces = 1 << 13;

Kernel pointwise_kernel("pointwise");

// Whether products of float32 matrices are computed in float32, not in bfloat16 as a program may have asked.
bool are_exact() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  const auto precision = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  return precision != at::Float32Precision::BF16 && precision != at::Float32Precision::TF32;
#else
  return false;  // it cannot be asked
#endif
}

// Places as rows of channels.
Tensor places(const Tensor& images) { return images.permute({0, 2, 3, 1}).reshape({-1, images.size(1)}); }

// A convolution of maps (N, C, H, W) by weights (K, C, 1, 1).
struct Pointwise {
  bool covered = false, bfloat16 = false, strided = false, small = false;
  int64_t stride[2] = {1, 1};

  Pointwise(const Tensor& x, const Tensor& w, Sizes steps, Sizes padding, bool transposed, const c10::SymInt& groups) {
    const auto type = x.scalar_type();
    const bool on = type == at::kFloat ? pointwise_kernel.on.load() && are_exact()
                                       : type == at::kBFloat16 && amx_kernel.on.load();
    if (!on || transposed || groups != 1 || x.dim() != 4 || w.dim() != 4 || w.scalar_type() != type || !is_dense(x) ||
        !is_dense(w) || w.size(2) != 1 || w.size(3) != 1 || w.size(1) != x.size(1) || x.numel() == 0 ||
        w.numel() == 0 || steps.size() > 2 || !x.is_contiguous(at::MemoryFormat::ChannelsLast)) {
      return;
    }
    for (const c10::SymInt& size : padding) {
      if (size != 0) return;
    }
    for (size_t axis = 0; axis < 2; ++axis) stride[axis] = steps[steps.size() == 1 ? 0 : axis].expect_int();
    covered = true, bfloat16 = type == at::kBFloat16, strided = stride[0] != 1 || stride[1] != 1;
    const int64_t image = out_size(x, 0) * out_size(x, 1);
    small = image <= kMaxImage && x.size(0) * image <= kMaxPlaces;
  }

  int64_t out_size(const Tensor& x, size_t axis) const { return (x.size(axis + 2) - 1) / stride[axis] + 1; }
  // The places that are read.
  Tensor read(const Tensor& x) const {
    return strided ? x.slice(2, 0, x.size(2), stride[0]).slice(3, 0, x.size(3), stride[1]) : x;
  }
};

Tensor matrix(const Tensor& w) { return w.reshape({w.size(0), w.size(1)}); }

// Maps whose places are these rows.
Tensor images_of(const Tensor& rows, const Tensor& like) {
  return rows.view({like.size(0), like.size(2), like.size(3), rows.size(1)}).permute({0, 3, 1, 2});
}

std::optional<Tensor> pointwise_output(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                                       const Pointwise& layer) {
  const bool biased = bias.has_value() && bias->defined();
  if (!layer.covered || layer.strided || (layer.bfloat16 && !layer.small) ||
      (biased && (bias->scalar_type() != x.scalar_type() || !is_dense(*bias)))) {
    return std::nullopt;
  }
  const Call call(layer.bfloat16 ? amx_kernel : pointwise_kernel);
  const Tensor rows = places(x), weights = matrix(w).t();
  return in_format(images_of(biased ? at::cpu::addmm(*bias, rows, weights) : at::cpu::mm(rows, weights), x), x, w);
}

// Input gradients; in bfloat16 also weight gradients. `by_torch` computes the others.
template <typename ByTorch>
std::optional<Gradients> pointwise_backward(const Tensor& grad, const Tensor& x, const Tensor& w,
                                            std::array<bool, 3> mask, const Pointwise& layer, const ByTorch& by_torch) {
  if (!layer.covered || grad.scalar_type() != x.scalar_type() || !is_dense(grad) || grad.dim() != 4) {
    return std::nullopt;
  }
  const bool input = mask[0] && (!layer.bfloat16 || layer.small || layer.strided);
  const bool weight = mask[1] && layer.bfloat16 && is_large(w.size(0), w.size(1));
  if (!input && !weight) return std::nullopt;
  const Call call(layer.bfloat16 ? amx_kernel : pointwise_kernel);
  Gradients made;
  if ((mask[0] && !input) || (mask[1] && !weight)) {
    made = by_torch(grad, x, w, {mask[0] && !input, mask[1] && !weight, mask[2] && !weight});
  }
  if (mask[2] && !std::get<2>(made).defined()) std::get<2>(made) = channel_sums(grad);
  const Tensor gradients = places(grad);
  if (input) {
    const Tensor rows = images_of(at::cpu::mm(gradients, matrix(w)), grad);
    Tensor images = layer.strided ? at::zeros_like(x, x.options(), at::MemoryFormat::ChannelsLast) : rows;
    if (layer.strided) layer.read(images).copy_(rows);
    std::get<0>(made) = in_format(images, x, w);
  }
  if (weight) {
    const Tensor product = product_of_transposed(gradients, places(layer.read(x)));
    std::get<1>(made) = in_format(product.view(w.sizes()), x, w);
  }
  return made;
}

}  // namespace
