// Weight gradients of bfloat16 convolutions of small images on AMX as products of matrices: for images of 7 x 7 places
// oneDNN's take 2 to 3 times as long, for larger ones as long.

#pragma once

#include <ATen/ops/empty.h>

#include "amx_products.hpp"
#include "depthwise_operators.hpp"

namespace {

constexpr size_t kMaxPatchImage = 64;     // places of an image, and of one whose weights are many
constexpr size_t kMaxLargePatchImage = 256;
constexpr int64_t kManyWeights = 1 << 18;  // channels times outputs
constexpr size_t kMaxPatchPlaces = 4096;  // of all images
constexpr int64_t kMinPatchChannels = 128;

// A convolution of maps (N, C, H, W) in one group.
struct Patched {
  Patches layer{};
  bool covered = false;

  Patched(const Tensor& grad, const Tensor& x, const Tensor& w, Sizes stride, Sizes padding, Sizes dilation,
          bool transposed, const c10::SymInt& groups) {
    const auto last = at::MemoryFormat::ChannelsLast;
    if (!amx_kernel.on || transposed || groups != 1 || x.dim() != 4 || w.dim() != 4 || grad.dim() != 4 ||
        !is_dense(x) || !is_dense(w) || !is_dense(grad) || x.scalar_type() != at::kBFloat16 ||
        w.scalar_type() != at::kBFloat16 || grad.scalar_type() != at::kBFloat16 || !x.is_contiguous(last) ||
        w.size(1) != x.size(1) || w.size(1) < kMinPatchChannels || w.size(0) < kMinPatchChannels || x.numel() == 0 ||
        grad.numel() == 0 || stride.size() > 2) {
      return;
    }
    layer.images = x.size(0), layer.height = x.size(2), layer.width = x.size(3), layer.channels = x.size(1);
    layer.out_height = grad.size(2), layer.out_width = grad.size(3), layer.threads = at::get_num_threads();
    for (size_t axis = 0; axis < 2; ++axis) {
      layer.kernel[axis] = w.size(axis + 2);
      layer.stride[axis] = stride[stride.size() == 1 ? 0 : axis].expect_int();
      layer.padding[axis] = padding[padding.size() == 1 ? 0 : axis].expect_int();
      layer.dilation[axis] = dilation[dilation.size() == 1 ? 0 : axis].expect_int();
    }
    const size_t image = layer.out_height * layer.out_width, taps = layer.kernel[0] * layer.kernel[1];
    const size_t most = w.size(0) * w.size(1) >= kManyWeights ? kMaxLargePatchImage : kMaxPatchImage;
    covered = image <= most && image * layer.images <= kMaxPatchPlaces && taps > 1 && taps <= kMostTaps;
  }
};

// Gradients; torch computes the input's.
template <typename ByTorch>
std::optional<Gradients> patched_backward(const Tensor& grad, const Tensor& x, const Tensor& w,
                                          std::array<bool, 3> mask, const Patched& patched, const ByTorch& by_torch) {
  if (!patched.covered || !mask[1]) return std::nullopt;
  const Patches& layer = patched.layer;
  const Tensor gradients = grad.permute({0, 2, 3, 1}).contiguous();
  if (!are_finite_halves(gradients.const_data_ptr(), gradients.numel(), layer.threads)) return std::nullopt;
  const Call call(amx_kernel);
  Gradients made;
  if (mask[0]) made = by_torch(grad, x, w, {true, false, false});
  if (mask[2]) std::get<2>(made) = channel_sums(grad);
  const int64_t places = gradients.numel() / w.size(0), taps = w.size(2) * w.size(3);
  const Tensor read = at::empty({places, taps * w.size(1)}, x.options());
  patches(layer, x.const_data_ptr(), read.data_ptr());
  const Tensor product = product_of_transposed(gradients.view({places, w.size(0)}), read);
  const Tensor weights = product.view({w.size(0), w.size(2), w.size(3), w.size(1)}).permute({0, 3, 1, 2});
  std::get<1>(made) = in_format(weights, x, w);
  return made;
}

}  // namespace
