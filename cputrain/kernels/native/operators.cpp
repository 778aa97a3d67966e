// Kernels below torch's CPU operators: what they do not cover goes on to torch's own.
//
// Depthwise convolutions, whose gradients torch computes at a fraction of a core's speed, and bfloat16 on CPUs without
// AVX-512, where torch leaves oneDNN: computed in float32 and rounded once.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <memory>
#include <tuple>

#include "depthwise.hpp"

namespace {

using at::Tensor;
using Sizes = c10::SymIntArrayRef;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t kMinChannels = 8;   // fewer do not fill a vector
constexpr int64_t kMinTaps = 4;       // taps in a row or column from which torch's float32 weight gradient is slow
constexpr int64_t kMostTaps = 1 << 10;

std::atomic<int64_t> depthwise_calls{0}, float32_calls{0};

// Whether torch computes bfloat16 by oneDNN on this CPU.
bool has_avx512() {
#ifdef __x86_64__
  static const bool found = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512dq");
  return found;
#else
  return true;  // torch asks the CPU for its own instructions
#endif
}

bool is_dense(const Tensor& value) { return value.layout() == at::kStrided && value.device().is_cpu(); }

// Whether torch would compute this bfloat16 value without oneDNN.
bool is_slow(const Tensor& value) {
  return value.scalar_type() == at::kBFloat16 && is_dense(value) && !has_avx512() && value.numel() > 0;
}

Tensor wide(const Tensor& value) { return value.defined() ? value.to(at::kFloat) : value; }
Tensor narrow(const Tensor& value) { return value.defined() ? value.to(at::kBFloat16) : value; }

std::optional<Tensor> wide(const std::optional<Tensor>& value) {
  return value.has_value() ? std::optional<Tensor>(wide(*value)) : value;
}

// A depthwise convolution of maps (N, C, H, W), or of rows (N, C, L) as maps of one line.
struct Depthwise {
  DepthwiseConvolution layer;
  bool covered = false;

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

Tensor like_torch(Tensor made, const Tensor& x, const Tensor& w) {
  return (x.dim() == 3 ? made.squeeze(2) : made).contiguous(format_of(x, w));
}

// Weights as (kernel height, kernel width, channels), float32.
Tensor by_tap(const Tensor& w) {
  const Tensor maps = w.dim() == 3 ? w.unsqueeze(2) : w;
  return maps.squeeze(1).permute({1, 2, 0}).to(at::kFloat).contiguous();
}

template <typename Work>
void by_type(const DepthwiseConvolution& layer, const Work& work) {
  layer.bfloat16 ? work(Bfloat16{}) : work(float{});
}

Tensor depthwise_output(const DepthwiseConvolution& layer, const Tensor& x, const Tensor& w,
                        const std::optional<Tensor>& bias) {
  const Tensor images = maps(x), weights = by_tap(w);
  const Tensor added = bias.has_value() && bias->defined() ? bias->to(at::kFloat).contiguous() : Tensor();
  const std::array<int64_t, 4> shape{static_cast<int64_t>(layer.images), static_cast<int64_t>(layer.channels),
                                     static_cast<int64_t>(layer.out_height), static_cast<int64_t>(layer.out_width)};
  Tensor made = at::empty(shape, x.options(), at::MemoryFormat::ChannelsLast);
  by_type(layer, [&](auto value) {
    using Value = decltype(value);
    forward(layer, static_cast<const Value*>(images.const_data_ptr()), weights.const_data_ptr<float>(),
            added.defined() ? added.const_data_ptr<float>() : nullptr, static_cast<Value*>(made.mutable_data_ptr()));
  });
  return like_torch(made, x, w);
}

Tensor depthwise_input_gradient(const DepthwiseConvolution& layer, const Tensor& grad, const Tensor& x,
                                const Tensor& w) {
  const Tensor gradients = maps(grad), weights = by_tap(w);
  const std::array<int64_t, 4> shape{static_cast<int64_t>(layer.images), static_cast<int64_t>(layer.channels),
                                     static_cast<int64_t>(layer.height), static_cast<int64_t>(layer.width)};
  Tensor made = at::empty(shape, x.options(), at::MemoryFormat::ChannelsLast);
  by_type(layer, [&](auto value) {
    using Value = decltype(value);
    input_gradient(layer, static_cast<const Value*>(gradients.const_data_ptr()), weights.const_data_ptr<float>(),
                   static_cast<Value*>(made.mutable_data_ptr()));
  });
  return like_torch(made, x, w);
}

Tensor depthwise_weight_gradient(const DepthwiseConvolution& layer, const Tensor& grad, const Tensor& x,
                                 const Tensor& w) {
  const Tensor images = maps(x), gradients = maps(grad);
  const std::array<int64_t, 3> shape{static_cast<int64_t>(layer.kernel[0]), static_cast<int64_t>(layer.kernel[1]),
                                     static_cast<int64_t>(layer.channels)};
  Tensor made = at::empty(shape, w.options().dtype(at::kFloat));
  by_type(layer, [&](auto value) {
    using Value = decltype(value);
    weight_gradient(layer, static_cast<const Value*>(images.const_data_ptr()),
                    static_cast<const Value*>(gradients.const_data_ptr()), made.mutable_data_ptr<float>());
  });
  return like_torch(made.permute({2, 0, 1}).unsqueeze(1).to(w.scalar_type()), x.dim() == 3 ? x : w, w);
}

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, Sizes stride, Sizes padding,
                   Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  const auto by_torch = [&](const Tensor& images, const Tensor& weights, const std::optional<Tensor>& added) {
    return at::compositeexplicitautograd::convolution_symint(images, weights, added, stride, padding, dilation,
                                                             transposed, output_padding, groups);
  };
  const bool biased = bias.has_value() && bias->defined();
  if (!is_slow(x) || !is_slow(w) || (biased && !is_slow(*bias))) return by_torch(x, w, bias);
  const Depthwise depthwise(x, w, stride, padding, dilation, transposed, groups);
  if (depthwise.covered) {
    ++depthwise_calls;
    return depthwise_output(depthwise.layer, x, w, bias);
  }
  ++float32_calls;
  return narrow(by_torch(wide(x), wide(w), wide(bias)));
}

Gradients convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& w, at::OptionalSymIntArrayRef bias,
                               Sizes stride, Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                               c10::SymInt groups, std::array<bool, 3> mask) {
  const auto by_torch = [&](const Tensor& gradients, const Tensor& images, const Tensor& weights,
                            std::array<bool, 3> wanted) {
    return at::compositeexplicitautograd::convolution_backward_symint(
        gradients, images, weights, bias, stride, padding, dilation, transposed, output_padding, groups, wanted);
  };
  const Depthwise depthwise(x, w, stride, padding, dilation, transposed, groups);
  const DepthwiseConvolution& layer = depthwise.layer;
  const bool slow = is_slow(x) && is_slow(w) && is_slow(grad);
  if (depthwise.covered && grad.scalar_type() == x.scalar_type() && is_dense(grad) && grad.dim() == x.dim()) {
    const bool bfloat16 = layer.bfloat16 != 0, strided = layer.stride[0] > 1 || layer.stride[1] > 1;
    const bool large = static_cast<int64_t>(std::max(layer.kernel[0], layer.kernel[1])) >= kMinTaps;
    const bool input = mask[0] && (slow || (has_avx512() && (strided || (bfloat16 && large))));
    const bool weight = mask[1] && (slow || large || (bfloat16 && strided));
    if (input || weight) {
      ++depthwise_calls;
      Gradients made;
      const std::array<bool, 3> left{mask[0] && !input, mask[1] && !weight, mask[2]};
      if (left[0] || left[1]) made = by_torch(grad, x, w, left);
      else if (left[2]) std::get<2>(made) = grad.to(at::kFloat).sum(x.dim() == 3 ? at::IntArrayRef{0, 2} : at::IntArrayRef{0, 2, 3}).to(w.scalar_type());
      if (input) std::get<0>(made) = depthwise_input_gradient(layer, grad, x, w);
      if (weight) std::get<1>(made) = depthwise_weight_gradient(layer, grad, x, w);
      return made;
    }
  }
  if (!slow) return by_torch(grad, x, w, mask);
  ++float32_calls;
  auto [input, weight, added] = by_torch(wide(grad), wide(x), wide(w), mask);
  return {narrow(input), narrow(weight), narrow(added)};
}

Tensor mm(const Tensor& a, const Tensor& b) {
  if (!is_slow(a) || !is_slow(b)) return at::cpu::mm(a, b);
  ++float32_calls;
  return narrow(at::cpu::mm(wide(a), wide(b)));
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  if (!is_slow(a) || !is_slow(b)) return at::cpu::bmm(a, b);
  ++float32_calls;
  return narrow(at::cpu::bmm(wide(a), wide(b)));
}

Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  if (!is_slow(a) || !is_slow(b) || !is_slow(c)) return at::cpu::addmm(c, a, b, beta, alpha);
  ++float32_calls;
  return narrow(at::cpu::addmm(wide(c), wide(a), wide(b), beta, alpha));
}

Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  if (!is_slow(a) || !is_slow(b) || !is_slow(c)) return at::cpu::baddbmm(c, a, b, beta, alpha);
  ++float32_calls;
  return narrow(at::cpu::baddbmm(wide(c), wide(a), wide(b), beta, alpha));
}

Gradients attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor& out, const Tensor& logsumexp, double dropout, bool causal,
                             const std::optional<Tensor>& mask, std::optional<double> scale) {
  const auto by_torch = at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward;
  if (!is_slow(grad) || !is_slow(query) || !is_slow(key) || !is_slow(value) || !is_slow(out)) {
    return by_torch(grad, query, key, value, out, logsumexp, dropout, causal, mask, scale);
  }
  ++float32_calls;
  const bool narrow_mask = mask.has_value() && mask->defined() && mask->scalar_type() == at::kBFloat16;
  auto [q, k, v] = by_torch(wide(grad), wide(query), wide(key), wide(value), wide(out), logsumexp, dropout, causal,
                            narrow_mask ? wide(mask) : mask, scale);
  return {narrow(q), narrow(k), narrow(v)};
}

class Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}  // torch warns that its own kernels are replaced, which is asked for
};

std::unique_ptr<torch::Library> registered;

}  // namespace

extern "C" {

// Registers the kernels below torch's operators in this process, or takes them away.
void set_operators(int on) {
  if (!on) {
    registered.reset();
    return;
  }
  if (registered != nullptr) return;
  static Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  registered = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  registered->impl("convolution", TORCH_FN(convolution));
  registered->impl("convolution_backward", TORCH_FN(convolution_backward));
  if (!has_avx512()) {
    registered->impl("mm", TORCH_FN(mm));
    registered->impl("bmm", TORCH_FN(bmm));
    registered->impl("addmm", TORCH_FN(addmm));
    registered->impl("baddbmm", TORCH_FN(baddbmm));
    registered->impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_FN(attention_backward));
  }
}

// Calls that the depthwise kernels, and float32 in place of bfloat16, have computed in this process.
int64_t calls_of_depthwise() { return depthwise_calls; }
int64_t calls_in_float32() { return float32_calls; }
}
