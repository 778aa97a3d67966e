// Depthwise convolutions of torch's tensors, whose gradients torch computes at a fraction of a core's speed.

#pragma once

#include <ATen/ops/empty.h>

#include <vector>

#include "operator_kernels.hpp"
#include "operators.hpp"

namespace {

using Sizes = c10::SymIntArrayRef;

constexpr int64_t kMinChannels = 8;   // fewer do not fill a vector
constexpr int64_t kMinTaps = 4;       // taps in a row or column from which torch's float32 weight gradient is slow
constexpr int64_t kMostTaps = 1 << 10;
constexpr int64_t kMinLineTaps = 8;   // the same, if images are lines
constexpr size_t kNearPlaces = 64 * 64;  // of images that are small
constexpr size_t kRowValues = 5500;      // of a row of which three stay in a core's caches

Kernel depthwise_kernel("depthwise");

// A depthwise convolution of maps (N, C, H, W), or of rows (N, C, L) as maps of one line.
struct Depthwise {
  DepthwiseConvolution layer;
  bool covered = false, line = false, last = false;  // rows of one line; channels-last maps, which are not copied

  Depthwise(const Tensor& x, const Tensor& w, Sizes stride, Sizes padding, Sizes dilation, bool transposed,
            const c10::SymInt& groups) {
    const int64_t axes = x.dim() - 2;
    const auto type = x.scalar_type();
    if (transposed || (axes != 1 && axes != 2) || w.dim() != x.dim() || w.scalar_type() != type || !is_dense(x) ||
        !is_dense(w) || (type != at::kFloat && type != at::kBFloat16) || x.numel() == 0 || w.numel() == 0 ||
        w.size(1) != 1 || w.size(0) != x.size(1) || groups != x.size(1) || x.size(1) < kMinChannels) {
      return;
    }
    layer = {};
    layer.images = x.size(0), layer.channels = x.size(1);
    layer.height = axes == 2 ? x.size(2) : 1, layer.width = x.size(x.dim() - 1);
    layer.kernel[0] = layer.stride[0] = layer.dilation[0] = 1, layer.padding[0] = 0;
    for (int64_t axis = 0; axis < axes; ++axis) {
      const int64_t to = axis + 2 - axes, at = stride.size() == 1 ? 0 : axis;
      layer.kernel[to] = w.size(axis + 2);
      layer.stride[to] = stride[at].expect_int();
      layer.padding[to] = padding[padding.size() == 1 ? 0 : axis].expect_int();
      layer.dilation[to] = dilation[dilation.size() == 1 ? 0 : axis].expect_int();
    }
    if (layer.kernel[0] * layer.kernel[1] > kMostTaps || stride.size() > 2) return;
    layer.out_height = out_size(0, layer.height), layer.out_width = out_size(1, layer.width);
    layer.bfloat16 = type == at::kBFloat16;
    layer.threads = at::get_num_threads();
    line = axes == 1, last = axes == 2 && x.is_contiguous(at::MemoryFormat::ChannelsLast);
    covered = layer.out_height > 0 && layer.out_width > 0;
  }

  // 0 if the kernel is larger than the padded image, for which torch has an error.
  size_t out_size(int axis, size_t size) const {
    const size_t padded = size + 2 * layer.padding[axis], kernel = layer.dilation[axis] * (layer.kernel[axis] - 1) + 1;
    return padded < kernel ? 0 : (padded - kernel) / layer.stride[axis] + 1;
  }
};

// Channels-last memory of maps, and of rows as maps of one line.
Tensor maps(const Tensor& value) {
  return (value.dim() == 3 ? value.unsqueeze(2) : value).contiguous(at::MemoryFormat::ChannelsLast);
}

// The memory format of torch's result.
at::MemoryFormat format_of(const Tensor& x, const Tensor& w) {
  const auto last = at::MemoryFormat::ChannelsLast;
  const bool is_last = x.dim() == 4 && (x.suggest_memory_format() == last || w.suggest_memory_format() == last);
  return is_last ? last : at::MemoryFormat::Contiguous;
}

// Returns the values in that format. Its strides count in dimensions of one value, too: those of gradients must be those
// of DistributedDataParallel's buckets.
Tensor in_format(const Tensor& made, const Tensor& x, const Tensor& w) {
  const auto format = format_of(x, w);
  const Tensor values = made.contiguous(format);
  if (format == at::MemoryFormat::ChannelsLast) {
    return values.as_strided(values.sizes(), c10::get_channels_last_strides_2d(values.sizes()));
  }
  std::vector<int64_t> strides(values.dim(), 1);
  for (int64_t axis = values.dim() - 1; axis > 0; --axis) strides[axis - 1] = strides[axis] * values.size(axis);
  return values.as_strided(values.sizes(), strides);
}

Tensor like_torch(const Tensor& made, const Tensor& x, const Tensor& w) {
  return in_format(x.dim() == 3 ? made.squeeze(2) : made, x, w);
}

// Weights as (kernel height, kernel width, channels), float32.
Tensor by_tap(const Tensor& w) {
  const Tensor maps = w.dim() == 3 ? w.unsqueeze(2) : w;
  return maps.squeeze(1).permute({1, 2, 0}).to(at::kFloat).contiguous();
}

Tensor depthwise_output(const DepthwiseConvolution& layer, const Tensor& x, const Tensor& w,
                        const std::optional<Tensor>& bias) {
  const Tensor images = maps(x), weights = by_tap(w);
  const Tensor added = bias.has_value() && bias->defined() ? bias->to(at::kFloat).contiguous() : Tensor();
  const std::array<int64_t, 4> shape{static_cast<int64_t>(layer.images), static_cast<int64_t>(layer.channels),
                                     static_cast<int64_t>(layer.out_height), static_cast<int64_t>(layer.out_width)};
  Tensor made = at::empty(shape, x.options(), at::MemoryFormat::ChannelsLast);
  depthwise_outputs(layer, images.const_data_ptr(), weights.const_data_ptr<float>(),
                    added.defined() ? added.const_data_ptr<float>() : nullptr, made.mutable_data_ptr());
  return like_torch(made, x, w);
}

Tensor depthwise_input_gradient(const DepthwiseConvolution& layer, const Tensor& grad, const Tensor& x,
                                const Tensor& w) {
  const Tensor gradients = maps(grad), weights = by_tap(w);
  const std::array<int64_t, 4> shape{static_cast<int64_t>(layer.images), static_cast<int64_t>(layer.channels),
                                     static_cast<int64_t>(layer.height), static_cast<int64_t>(layer.width)};
  Tensor made = at::empty(shape, x.options(), at::MemoryFormat::ChannelsLast);
  depthwise_input_gradients(layer, gradients.const_data_ptr(), weights.const_data_ptr<float>(),
                            made.mutable_data_ptr());
  return like_torch(made, x, w);
}

Tensor depthwise_weight_gradient(const DepthwiseConvolution& layer, const Tensor& grad, const Tensor& x,
                                 const Tensor& w) {
  const Tensor images = maps(x), gradients = maps(grad);
  const std::array<int64_t, 3> shape{static_cast<int64_t>(layer.kernel[0]), static_cast<int64_t>(layer.kernel[1]),
                                     static_cast<int64_t>(layer.channels)};
  Tensor made = at::empty(shape, w.options().dtype(at::kFloat));
  depthwise_weight_gradients(layer, images.const_data_ptr(), gradients.const_data_ptr(),
                             made.mutable_data_ptr<float>());
  return like_torch(made.permute({2, 0, 1}).unsqueeze(1).to(w.scalar_type()), x.dim() == 3 ? x : w, w);
}

bool is_strided(const DepthwiseConvolution& layer) { return layer.stride[0] > 1 || layer.stride[1] > 1; }

// Whether a kernel has many taps in a row or column.
bool is_large(const Depthwise& depthwise) {
  const int64_t most = std::max(depthwise.layer.kernel[0], depthwise.layer.kernel[1]);
  return most >= (depthwise.line ? kMinLineTaps : kMinTaps);
}

// Whether oneDNN on AVX2 takes longer for float32 outputs. Channels-last: 1.0 to 1.7 times for large kernels, 1.3 to 2
// times for 3 x 3 kernels and images whose rows are short enough (0.7 to 0.9 times for others). Lines: 3 to 4 times for
// large kernels. Maps that have to be copied for ours: 0.5 times.
bool is_slow_on_avx2(const Depthwise& depthwise) {
  const DepthwiseConvolution& layer = depthwise.layer;
  const bool three = layer.kernel[0] == 3 && layer.kernel[1] == 3 && layer.dilation[0] == 1 && layer.dilation[1] == 1;
  const bool near = depthwise.last && three && layer.width * layer.channels <= kRowValues;
  return !has_avx512() && layer.bfloat16 == 0 && (((depthwise.last || depthwise.line) && is_large(depthwise)) || near);
}

// Outputs, if torch computes them slowly: without oneDNN, or on AVX2.
std::optional<Tensor> depthwise_forward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                                        const Depthwise& depthwise) {
  const bool biased = bias.has_value() && bias->defined();
  if (!depthwise.covered || (biased && (bias->scalar_type() != x.scalar_type() || !is_dense(*bias)))) {
    return std::nullopt;
  }
  if (!is_slow(x) && !is_slow_on_avx2(depthwise)) return std::nullopt;
  const Call call(depthwise_kernel);
  return depthwise_output(depthwise.layer, x, w, bias);
}

// Whether torch computes the weight gradient slowly: without oneDNN; of large kernels (2 to 7 times our time); in
// bfloat16 at a stride. On AVX2 also of small kernels in channels-last images (1.2 to 2.4 times), except at a stride in
// large ones (0.9).
bool is_slow_weight_gradient(const Depthwise& depthwise, bool slow) {
  const DepthwiseConvolution& layer = depthwise.layer;
  const bool strided = is_strided(layer), near = layer.height * layer.width <= kNearPlaces;
  return slow || is_large(depthwise) || (layer.bfloat16 != 0 && strided) ||
         (!has_avx512() && depthwise.last && (!strided || near));
}

// Whether torch computes the input gradient slowly: without oneDNN; at stride 1 as its outputs; with AVX-512 at a
// stride (4 to 10 times our time), and in bfloat16 of large kernels (7 to 24 times).
bool is_slow_input_gradient(const Depthwise& depthwise, bool slow) {
  const bool strided = is_strided(depthwise.layer);
  return slow || (!strided && is_slow_on_avx2(depthwise)) ||
         (has_avx512() && (strided || (depthwise.layer.bfloat16 != 0 && is_large(depthwise))));
}

// Gradients, if one of them is wanted that torch computes slowly; `by_torch` computes the input's otherwise.
template <typename ByTorch>
std::optional<Gradients> depthwise_backward(const Tensor& grad, const Tensor& x, const Tensor& w,
                                            std::array<bool, 3> mask, const Depthwise& depthwise,
                                            const ByTorch& by_torch) {
  const DepthwiseConvolution& layer = depthwise.layer;
  if (!depthwise.covered || grad.scalar_type() != x.scalar_type() || !is_dense(grad) || grad.dim() != x.dim()) {
    return std::nullopt;
  }
  const bool input = mask[0] && is_slow_input_gradient(depthwise, is_slow(x));
  const bool weight = mask[1] && is_slow_weight_gradient(depthwise, is_slow(x));
  if (!input && !weight) return std::nullopt;
  const Call call(depthwise_kernel);
  Gradients made;
  if ((mask[0] && !input) || (mask[1] && !weight)) {
    made = by_torch(grad, x, w, {mask[0] && !input, mask[1] && !weight, mask[2] && !weight});
  }
  if (mask[2] && !std::get<2>(made).defined()) std::get<2>(made) = channel_sums(grad);
  if (input) std::get<0>(made) = depthwise_input_gradient(layer, grad, x, w);
  if (weight) std::get<1>(made) = depthwise_weight_gradient(layer, grad, x, w);
  return made;
}

}  // namespace
