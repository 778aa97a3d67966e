// aten::convolution and aten::convolution_backward: the first kernel that covers the layer, or torch's.

#pragma once

#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_compositeexplicitautograd_dispatch.h>

#include "depthwise_operators.hpp"
#include "grouped_operators.hpp"
#include "patch_operators.hpp"
#include "pointwise_operators.hpp"
#include "product_operators.hpp"
#include "unwritten_operators.hpp"

namespace {

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, Sizes stride, Sizes padding,
                   Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  if (depthwise_kernel.on) {
    const Depthwise layer(x, w, stride, padding, dilation, transposed, groups);
    if (auto made = depthwise_forward(x, w, bias, layer)) return *made;
  }
  if (auto made = pointwise_output(x, w, bias, Pointwise(x, w, stride, padding, transposed, groups))) return *made;
  const bool biased = bias.has_value() && bias->defined();
  if (in_float32(x, w) && (!biased || is_slow(*bias))) {
    const Call call(float32_kernel);
    return narrow(convolution(wide(x), wide(w), wide(bias), stride, padding, dilation, transposed, output_padding,
                              groups));
  }
  if (auto made = grouped_output(x, w, bias, Grouped(x, w, stride, padding, dilation, transposed, groups))) {
    return *made;
  }
  const bool unwritten = is_strided_column(x, w, stride, padding, dilation, transposed);
  if (!unwritten) {
    if (auto made = merged_output(x, w, bias, stride, padding, dilation, transposed, output_padding, groups)) {
      return *made;
    }
  }
  const auto by_torch = [&](const Tensor& images, const Tensor& weights, const std::optional<Tensor>& biases) {
    return at::compositeexplicitautograd::convolution_symint(images, weights, biases, stride, padding, dilation,
                                                             transposed, output_padding, groups);
  };
  if (!unwritten) return by_torch(x, w, bias);
  const Call call(unwritten_kernel);
  return narrow(by_torch(wide(x), wide(w), wide(bias)));
}

Gradients gradients(const Tensor& grad, const Tensor& x, const Tensor& w, at::OptionalSymIntArrayRef bias, Sizes stride,
                    Sizes padding, Sizes dilation, bool transposed, Sizes output_padding, const c10::SymInt& groups,
                    std::array<bool, 3> mask) {
  const auto by_torch = [&](const Tensor& scale, const Tensor& images, const Tensor& weights,
                            std::array<bool, 3> wanted) {
    return at::compositeexplicitautograd::convolution_backward_symint(
        scale, images, weights, bias, stride, padding, dilation, transposed, output_padding, groups, wanted);
  };
  if (depthwise_kernel.on) {
    const Depthwise layer(x, w, stride, padding, dilation, transposed, groups);
    if (auto made = depthwise_backward(grad, x, w, mask, layer, by_torch)) return *made;
  }
  const Pointwise places(x, w, stride, padding, transposed, groups);
  if (auto made = pointwise_backward(grad, x, w, mask, places, by_torch)) return *made;
  const Patched patched(grad, x, w, stride, padding, dilation, transposed, groups);
  if (auto made = patched_backward(grad, x, w, mask, patched, by_torch)) return *made;
  if (in_float32(grad, x, w)) {
    const Call call(float32_kernel);
    auto [input, weight, added] = gradients(wide(grad), wide(x), wide(w), bias, stride, padding, dilation, transposed,
                                            output_padding, groups, mask);
    return {narrow(input), narrow(weight), narrow(added)};
  }
  const Grouped layer(x, w, stride, padding, dilation, transposed, groups);
  if (auto made = grouped_backward(grad, x, w, mask, layer, by_torch)) return *made;
  if (auto made = merged_backward(grad, x, w, stride, padding, dilation, output_padding, transposed, groups, mask,
                                  by_torch)) {
    return *made;
  }
  return by_torch(grad, x, w, mask);
}

Gradients convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& w, at::OptionalSymIntArrayRef bias,
                               Sizes stride, Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                               c10::SymInt groups, std::array<bool, 3> mask) {
  Gradients made =
      gradients(grad, x, w, bias, stride, padding, dilation, transposed, output_padding, groups, mask);
  clear_padding_taps(std::get<1>(made), grad, x, stride, padding, dilation, transposed);
  return made;
}

}  // namespace
