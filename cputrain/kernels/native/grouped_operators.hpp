// Grouped convolutions of torch's channels-last images, in small groups.
//
// On AVX2, in float32, of 4 to 24 channels: oneDNN reaches 10 to 45 % of a core's speed; ours take 0.65 to 0.95 of its
// time, gradients included (1.2 to 1.9 if images had to be copied). With AVX-512 oneDNN's weight gradients of up to 8
// channels take 1.1 to 1.9 times as long as those of groups of 16, in bfloat16 on AMX 1.6 to 13 times, so groups are
// merged; outputs and input gradients in bfloat16 on AMX take 1.1 to 2.2 times as long as those of groups of 32, zeros and
// all.

#pragma once

#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/zeros.h>

#include "depthwise_operators.hpp"

namespace {

constexpr int64_t kMergedChannels = 16;  // of merged groups, for their weight gradients
constexpr int64_t kMergedMaps = 32;      // the same, for outputs and input gradients in bfloat16
constexpr int64_t kMaxMergedGroup = 8;   // channels and outputs of a group that is merged for those
constexpr int64_t kMaxMergedTaps = 25;
constexpr int64_t kMinMergedPlaces = 1 << 10;  // of all images

Kernel grouped_kernel("grouped");

// A grouped convolution of maps (N, C, H, W) with as many outputs as inputs.
struct Grouped {
  GroupedConvolution layer{};
  bool covered = false;

  Grouped(const Tensor& x, const Tensor& w, Sizes stride, Sizes padding, Sizes dilation, bool transposed,
          const c10::SymInt& groups) {
    if (!grouped_kernel.on || transposed || x.dim() != 4 || w.dim() != 4 || !is_dense(x) || !is_dense(w) ||
        x.scalar_type() != at::kFloat || w.scalar_type() != at::kFloat || x.numel() == 0 || w.numel() == 0 ||
        !x.is_contiguous(at::MemoryFormat::ChannelsLast) ||
        w.size(0) != x.size(1) || groups < 2 || w.size(1) * groups.expect_int() != x.size(1) || stride.size() > 2) {
      return;
    }
    layer.images = x.size(0), layer.channels = x.size(1), layer.height = x.size(2), layer.width = x.size(3);
    layer.groups = groups.expect_int(), layer.threads = at::get_num_threads();
    for (size_t axis = 0; axis < 2; ++axis) {
      layer.kernel[axis] = w.size(axis + 2);
      layer.stride[axis] = stride[stride.size() == 1 ? 0 : axis].expect_int();
      layer.padding[axis] = padding[padding.size() == 1 ? 0 : axis].expect_int();
      layer.dilation[axis] = dilation[dilation.size() == 1 ? 0 : axis].expect_int();
    }
    layer.out_height = out_size(0, layer.height), layer.out_width = out_size(1, layer.width);
    covered = layer.out_height > 0 && layer.out_width > 0 && layer.kernel[0] * layer.kernel[1] <= kMostTaps &&
              grouped_covers(layer.channels, layer.groups);
  }

  size_t reach(size_t axis) const { return layer.dilation[axis] * (layer.kernel[axis] - 1); }
  size_t out_size(size_t axis, size_t size) const {
    const size_t padded = size + 2 * layer.padding[axis];
    return padded < reach(axis) + 1 ? 0 : (padded - reach(axis) - 1) / layer.stride[axis] + 1;
  }
  // Whether the input gradient is a convolution of the outputs' gradients, padded by at least nothing.
  bool turns() const {
    return layer.stride[0] == 1 && layer.stride[1] == 1 && layer.padding[0] <= reach(0) && layer.padding[1] <= reach(1);
  }
  // The layer whose outputs are the input gradient.
  GroupedConvolution turned() const {
    GroupedConvolution other = layer;
    other.height = layer.out_height, other.width = layer.out_width;
    other.out_height = layer.height, other.out_width = layer.width;
    for (size_t axis = 0; axis < 2; ++axis) other.padding[axis] = reach(axis) - layer.padding[axis];
    return other;
  }
};

// Weights as (block, group of the block, output, input, tap).
Tensor by_group(const GroupedConvolution& layer, const Tensor& w) {
  const int64_t channels = w.size(1), together = grouped_block(channels);
  return w.contiguous().view({w.size(0) / channels / together, together, channels, channels, -1});
}

Tensor grouped_result(const GroupedConvolution& layer, const Tensor& x, const Tensor& weights, const Tensor& bias) {
  const Tensor images = x.contiguous(at::MemoryFormat::ChannelsLast);
  Tensor made = at::empty({x.size(0), x.size(1), static_cast<int64_t>(layer.out_height),
                           static_cast<int64_t>(layer.out_width)}, x.options(), at::MemoryFormat::ChannelsLast);
  grouped_convolution(layer, images.const_data_ptr<float>(), weights.const_data_ptr<float>(),
                      bias.defined() ? bias.const_data_ptr<float>() : nullptr, made.mutable_data_ptr<float>());
  return made;
}

bool is_finite(const Tensor& dense) { return are_finite(dense.const_data_ptr<float>(), dense.numel()); }

std::optional<Tensor> grouped_output(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                                     const Grouped& grouped) {
  const bool biased = bias.has_value() && bias->defined();
  if (!grouped.covered || (biased && (bias->scalar_type() != at::kFloat || !is_dense(*bias)))) return std::nullopt;
  const Tensor weights = by_group(grouped.layer, w).permute({0, 4, 3, 1, 2}).contiguous();
  if (!is_finite(weights)) return std::nullopt;
  const Call call(grouped_kernel);
  return in_format(grouped_result(grouped.layer, x, weights, biased ? bias->contiguous() : Tensor()), x, w);
}

// Gradients; torch computes the input's at a stride.
template <typename ByTorch>
std::optional<Gradients> grouped_backward(const Tensor& grad, const Tensor& x, const Tensor& w,
                                          std::array<bool, 3> mask, const Grouped& grouped, const ByTorch& by_torch) {
  if (!grouped.covered || grad.scalar_type() != at::kFloat || !is_dense(grad) || grad.dim() != 4) return std::nullopt;
  const GroupedConvolution& layer = grouped.layer;
  const auto last = at::MemoryFormat::ChannelsLast;
  const Tensor gradients = grad.contiguous(last);
  const Tensor weights = at::flip(by_group(layer, w), {4}).permute({0, 4, 2, 1, 3}).contiguous();
  const bool input = mask[0] && grouped.turns();
  if ((!input && !mask[1]) || !is_finite(gradients) || (input && !is_finite(weights))) return std::nullopt;
  const Call call(grouped_kernel);
  Gradients made;
  if (mask[0] && !input) made = by_torch(grad, x, w, {true, false, false});
  if (mask[2]) std::get<2>(made) = channel_sums(grad);
  if (input) {
    std::get<0>(made) = in_format(grouped_result(grouped.turned(), gradients, weights, Tensor()), x, w);
  }
  if (mask[1]) {
    const Tensor groups = by_group(layer, w), images = x.contiguous(last);
    Tensor sums = at::empty({groups.size(0), groups.size(4), groups.size(3), groups.size(1), groups.size(2)},
                            w.options());
    grouped_weight_gradients(layer, images.const_data_ptr<float>(), gradients.const_data_ptr<float>(),
                             sums.mutable_data_ptr<float>());
    std::get<1>(made) = in_format(sums.permute({0, 3, 4, 2, 1}).reshape(w.sizes()), x, w);
  }
  return made;
}

// How many groups are merged into one of at most `channels` channels, 1 for none.
int64_t merged_groups(const Tensor& x, const Tensor& w, bool transposed, const c10::SymInt& groups, int64_t channels) {
  const auto type = x.scalar_type();
  if (!grouped_kernel.on || !has_avx512() || transposed || x.dim() != 4 || w.dim() != 4 || !is_dense(x) ||
      !is_dense(w) || w.scalar_type() != type || (type != at::kFloat && !(type == at::kBFloat16 && has_amx())) ||
      x.numel() == 0 || w.numel() == 0 || w.size(1) < 2 || w.size(1) * groups.expect_int() != x.size(1) ||
      w.size(0) % groups.expect_int() != 0 || !x.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return 1;
  }
  int64_t merged = channels / w.size(1);
  while (merged > 1 && groups.expect_int() % merged != 0) --merged;
  return std::max<int64_t>(1, merged);
}

// The same for outputs and input gradients.
int64_t merged_maps(const Tensor& x, const Tensor& w, bool transposed, const c10::SymInt& groups) {
  if (x.scalar_type() != at::kBFloat16 || x.dim() != 4 || w.dim() != 4 || w.size(1) > kMaxMergedGroup ||
      w.size(0) > kMaxMergedGroup * groups.expect_int() || w.size(2) * w.size(3) > kMaxMergedTaps ||
      x.size(0) * x.size(2) * x.size(3) < kMinMergedPlaces) {
    return 1;
  }
  return merged_groups(x, w, transposed, groups, kMergedMaps);
}

// Whether channels-last maps are finite: those of merged groups are also multiplied by zeros.
bool are_finite_maps(const Tensor& maps) {
  return are_finite_halves(maps.const_data_ptr(), maps.numel(), at::get_num_threads());
}

// Weights of merged groups: zeros between the channels of different ones.
Tensor merged_weights(const Tensor& w, int64_t groups, int64_t merged) {
  const int64_t outputs = w.size(0) / groups, inputs = w.size(1), height = w.size(2), width = w.size(3);
  const Tensor larger =
      at::zeros({groups / merged, merged, outputs, height, width, merged, inputs}, w.options());  // channels-last
  larger.diagonal(0, 1, 5).copy_(
      w.reshape({groups / merged, merged, outputs, inputs, height, width}).permute({0, 2, 4, 5, 3, 1}));
  return larger.view({w.size(0), height, width, merged * inputs}).permute({0, 3, 1, 2});
}

std::optional<Tensor> merged_output(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, Sizes stride,
                                    Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                                    const c10::SymInt& groups) {
  const bool biased = bias.has_value() && bias->defined();
  if (biased && (bias->scalar_type() != x.scalar_type() || !is_dense(*bias) || bias->dim() != 1 ||
                 bias->size(0) != w.size(0))) {
    return std::nullopt;
  }
  const int64_t merged = merged_maps(x, w, transposed, groups);
  if (merged == 1 || !are_finite_maps(x)) return std::nullopt;
  const Call call(grouped_kernel);
  const int64_t count = groups.expect_int();
  const Tensor made = at::compositeexplicitautograd::convolution_symint(
      x, merged_weights(w, count, merged), bias, stride, padding, dilation, false, output_padding, count / merged);
  return in_format(made, x, w);
}

// Gradients; those of the weights are the blocks that belong to the groups of a layer of larger ones. Torch computes
// the input's, of merged groups where it is faster.
template <typename ByTorch>
std::optional<Gradients> merged_backward(const Tensor& grad, const Tensor& x, const Tensor& w, Sizes stride,
                                         Sizes padding, Sizes dilation, Sizes output_padding, bool transposed,
                                         const c10::SymInt& groups, std::array<bool, 3> mask,
                                         const ByTorch& by_torch) {
  if (grad.scalar_type() != x.scalar_type() || !is_dense(grad) || grad.dim() != 4) return std::nullopt;
  const int64_t merged = mask[1] ? merged_groups(x, w, transposed, groups, kMergedChannels) : 1;
  int64_t maps = mask[0] ? merged_maps(x, w, transposed, groups) : 1;
  if (merged == 1 && maps == 1) return std::nullopt;
  const Tensor gradients = grad.contiguous(at::MemoryFormat::ChannelsLast);
  if (maps > 1 && !are_finite_maps(gradients)) maps = 1;
  if (merged == 1 && maps == 1) return std::nullopt;
  const Call call(grouped_kernel);
  const int64_t count = groups.expect_int(), inputs = w.size(1), outputs = w.size(0) / count;
  const c10::SymInt biases[]{w.size(0)};
  const auto of_merged = [&](const Tensor& weights, int64_t together, std::array<bool, 3> wanted) {
    return at::compositeexplicitautograd::convolution_backward_symint(gradients, x, weights, Sizes(biases), stride,
                                                                      padding, dilation, false, output_padding,
                                                                      count / together, wanted);
  };
  Gradients made;
  if (merged > 1) {
    const Tensor larger = at::empty({w.size(0), merged * inputs, w.size(2), w.size(3)}, w.options());
    made = of_merged(larger, merged, {false, true, mask[2]});
    Tensor& weights = std::get<1>(made);
    weights = weights.reshape({count / merged, merged, outputs, merged, inputs, w.size(2), w.size(3)})
                  .diagonal(0, 1, 3)
                  .permute({0, 5, 1, 2, 3, 4})
                  .reshape(w.sizes());
    weights = in_format(weights, x, w);
  } else if (mask[1]) {
    made = by_torch(gradients, x, w, {false, true, mask[2]});
  } else if (mask[2]) {
    std::get<2>(made) = channel_sums(gradients);
  }
  if (maps > 1) {
    const Tensor images = std::get<0>(of_merged(merged_weights(w, count, maps), maps, {true, false, false}));
    std::get<0>(made) = in_format(images, x, w);
  } else if (mask[0]) {
    std::get<0>(made) = std::get<0>(by_torch(gradients, x, w, {true, false, false}));
  }
  return made;
}

}  // namespace
