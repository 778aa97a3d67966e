// The kernels below torch's operators, for each type of values.

#include "operator_kernels.hpp"

#include "batch_norm.hpp"
#include "depthwise.hpp"
#include "grouped.hpp"

namespace {

template <typename Work>
void by_type(int bfloat16, const Work& work) {
  bfloat16 != 0 ? work(Bfloat16{}) : work(float{});
}

}  // namespace

void depthwise_outputs(const DepthwiseConvolution& layer, const void* x, const float* weights, const float* bias,
                       void* out) {
  by_type(layer.bfloat16, [&]<typename T>(T) {
    forward(layer, static_cast<const T*>(x), weights, bias, static_cast<T*>(out));
  });
}

void depthwise_input_gradients(const DepthwiseConvolution& layer, const void* g, const float* weights, void* out) {
  by_type(layer.bfloat16,
          [&]<typename T>(T) { input_gradient(layer, static_cast<const T*>(g), weights, static_cast<T*>(out)); });
}

void depthwise_weight_gradients(const DepthwiseConvolution& layer, const void* x, const void* g, float* out) {
  by_type(layer.bfloat16,
          [&]<typename T>(T) { weight_gradient(layer, static_cast<const T*>(x), static_cast<const T*>(g), out); });
}

void batch_norm_outputs(const NormRows& values, const NormParameters& parameters, double eps, double momentum,
                        const void* x, void* y, float* mean, float* inverse, float* running_mean,
                        float* running_variance) {
  by_type(values.bfloat16, [&]<typename T>(T) {
    batch_norm_forward(values, parameters, eps, momentum, static_cast<const T*>(x), static_cast<T*>(y), mean, inverse,
                       running_mean, running_variance);
  });
}

void batch_norm_gradients(const NormRows& values, const NormParameters& parameters, const float* mean,
                          const float* inverse, const void* g, const void* x, void* dx, float* dweight, float* dbias) {
  by_type(values.bfloat16, [&]<typename T>(T) {
    batch_norm_backward(values, parameters, mean, inverse, static_cast<const T*>(g), static_cast<const T*>(x),
                        static_cast<T*>(dx), dweight, dbias);
  });
}

#ifdef __AVX512F__
bool grouped_covers(size_t, size_t) { return false; }  // not measured
#else
bool grouped_covers(size_t channels, size_t groups) {
  const size_t each = channels / groups;
  return (each == 4 && groups % 2 == 0) || each == 8 || each == 16 || each == 24;  // of 32 torch's are as fast
}
#endif

size_t grouped_block(size_t channels) { return std::max<size_t>(1, kWidth / channels); }

void grouped_convolution(const GroupedConvolution& layer, const float* x, const float* weights, const float* bias,
                         float* out) {
  grouped_forward(layer, x, weights, bias, out);
}

void grouped_weight_gradients(const GroupedConvolution& layer, const float* x, const float* g, float* out) {
  grouped_weight_gradient(layer, x, g, out);
}

bool are_finite(const float* values, size_t count) { return all_finite(values, count); }
