// What oneDNN 3.12 leaves as the memory was, in bfloat16:
// - weight gradients of filter taps that meet only padding, such as eight of nine where a 3 x 3 layer of stride 2 has an
//   image of one pixel: they are zero;
// - on AMX, some outputs of one column at a horizontal stride (of 6,174 shapes that were tried, with 5 rows and more).

#pragma once

#include "operators.hpp"

namespace {

Kernel unwritten_kernel("unwritten by oneDNN");

// An axis of a convolution.
struct Axis {
  int64_t inputs, outputs, stride, padding, dilation;

  bool meets_input(int64_t tap) const {
    for (int64_t output = 0; output < outputs; ++output) {
      const int64_t place = output * stride + tap * dilation - padding;
      if (place >= 0 && place < inputs) return true;
    }
    return false;
  }
};

int64_t of_axis(Sizes values, int64_t axis) { return values[values.size() == 1 ? 0 : axis].expect_int(); }

// Whether a layer has outputs of one column at a stride, on AMX.
bool is_strided_column(const Tensor& x, const Tensor& w, Sizes stride, Sizes padding, Sizes dilation, bool transposed) {
  if (!unwritten_kernel.on || !has_amx() || transposed || x.dim() != 4 || w.dim() != 4 || !is_dense(x) ||
      !is_dense(w) || x.scalar_type() != at::kBFloat16 || w.scalar_type() != at::kBFloat16) {
    return false;
  }
  const int64_t step = of_axis(stride, 1), reach = of_axis(dilation, 1) * (w.size(3) - 1);
  const int64_t last = x.size(3) + 2 * of_axis(padding, 1) - reach - 1;
  return step > 1 && last >= 0 && last < step;
}

void clear_padding_taps(const Tensor& weight_gradients, const Tensor& grad, const Tensor& x, Sizes stride,
                        Sizes padding, Sizes dilation, bool transposed) {
  if (!unwritten_kernel.on || !weight_gradients.defined() || !is_dense(weight_gradients) ||
      weight_gradients.scalar_type() != at::kBFloat16 || weight_gradients.dim() != x.dim()) {
    return;
  }
  const Tensor &inputs = transposed ? grad : x, &outputs = transposed ? x : grad;
  std::optional<Call> call;
  for (int64_t axis = 0; axis < weight_gradients.dim() - 2; ++axis) {
    const Axis places{inputs.size(axis + 2), outputs.size(axis + 2), of_axis(stride, axis), of_axis(padding, axis),
                      of_axis(dilation, axis)};
    for (int64_t tap = 0; tap < weight_gradients.size(axis + 2); ++tap) {
      if (places.meets_input(tap)) continue;
      if (!call.has_value()) call.emplace(unwritten_kernel);
      weight_gradients.select(axis + 2, tap).zero_();
    }
  }
}

}  // namespace
