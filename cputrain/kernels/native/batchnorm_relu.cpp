// Batch-norm fused with residual addition and ReLU, forward and backward, each in two passes over the images.
//
// Plain C functions for ctypes. Images are channels-last: `rows` = images x height x width rows of `channels` values,
// float32 or bfloat16. Parameters are float32, or null for 1 and 0; statistics and sums are double.
//
// Sums are taken over chunks of rows that do not depend on the number of threads, and added in a fixed order, so that
// results are bitwise equal for any number of threads. The backward pass recomputes from the input which values ReLU
// has cut, or reads it from the output if a residual was added, so no mask is stored.

#include "backward.hpp"

extern "C" {

// Images of one layer: size, data type and number of threads.
struct Images {
  size_t rows, channels;
  int bfloat16, threads;
};

// A layer's parameters, the statistics (mean, variance) it normalizes by, and whether ReLU follows.
struct Layer {
  const double* statistics;
  const float *weight, *bias;
  double eps;
  int relu;
};

// Returns whether torch's OpenMP runtime is visible.
int batchnorm_has_threads() {
  return GOMP_parallel != nullptr && omp_get_thread_num != nullptr && omp_get_num_threads != nullptr;
}

// Writes the mean and variance of each channel to out, 2 x channels.
void batchnorm_statistics(const Images* images, const void* x, double* out) {
  const auto run = [&]<typename T>(const T* input) {
    statistics(input, images->rows, images->channels, images->threads, out);
  };
  images->bfloat16 != 0 ? run(static_cast<const Bfloat16*>(x)) : run(static_cast<const float*>(x));
}

// running = (1 - momentum) running + momentum mean(statistics), with the mean over `parts` ghost batches. statistics is
// parts x 2 x channels; `counts` is the number of values per channel in each part, to make the variance unbiased.
void batchnorm_update_running(size_t parts, size_t channels, const double* statistics, const double* counts,
                              double momentum, float* running_mean, float* running_variance) {
  for (size_t c = 0; c < channels; ++c) {
    double mean = 0, variance = 0;
    for (size_t i = 0; i < parts; ++i) {
      const double* part = statistics + 2 * channels * i;
      mean += part[c] / static_cast<double>(parts);
      variance += part[channels + c] * (counts[i] / (counts[i] - 1)) / static_cast<double>(parts);
    }
    running_mean[c] = static_cast<float>(running_mean[c] + momentum * (mean - running_mean[c]));
    running_variance[c] = static_cast<float>(running_variance[c] + momentum * (variance - running_variance[c]));
  }
}

// y = ReLU((x - mean) / sqrt(variance + eps) weight + bias + residual); residual may be null.
void batchnorm_forward(const Images* images, const Layer* layer, const void* x, const void* residual, void* y) {
  const size_t rows = images->rows, channels = images->channels;
  const Affine map = affine(layer->statistics, channels, layer->weight, layer->bias, layer->eps);
  const auto run = [&]<typename T>(const T* input) {
    const T* added = static_cast<const T*>(residual);
    T* output = static_cast<T*>(y);
    const auto as = [&]<bool kResidual, bool kRelu>() {
      normalize<T, kResidual, kRelu>(input, added, output, rows, channels, images->threads, map);
    };
    if (residual != nullptr) {
      layer->relu != 0 ? as.template operator()<true, true>() : as.template operator()<true, false>();
    } else {
      layer->relu != 0 ? as.template operator()<false, true>() : as.template operator()<false, false>();
    }
  };
  images->bfloat16 != 0 ? run(static_cast<const Bfloat16*>(x)) : run(static_cast<const float*>(x));
}

// With g = dL/dy, writes the sums over rows of g before ReLU and of its product with (x - mean) to out, 2 x channels.
// If an output y is given, its sign shows what ReLU cut, and g before ReLU, the residual's gradient, is written to
// `before`. In this case dL/dy may be the sum of g and h; otherwise h is null.
void batchnorm_gradient_sums(const Images* images, const Layer* layer, const void* g, const void* h, const void* x,
                             const void* y, void* before, double* out) {
  const size_t rows = images->rows, channels = images->channels;
  const Affine map = affine(layer->statistics, channels, layer->weight, layer->bias, layer->eps);
  const auto run = [&]<typename T>(const T* gradient) {
    const auto as = [&]<Relu kRelu, bool kTwo>() {
      gradient_sums<T, kRelu, kTwo>(gradient, static_cast<const T*>(h), static_cast<const T*>(x),
                                    static_cast<const T*>(y), static_cast<T*>(before), rows, channels, images->threads,
                                    map, out);
    };
    if (layer->relu == 0) {
      as.template operator()<Relu::kNone, false>();
    } else if (y == nullptr) {
      as.template operator()<Relu::kFromInput, false>();
    } else if (h == nullptr) {
      as.template operator()<Relu::kFromOutput, false>();
    } else {
      as.template operator()<Relu::kFromOutput, true>();
    }
  };
  images->bfloat16 != 0 ? run(static_cast<const Bfloat16*>(g)) : run(static_cast<const float*>(g));
}

// Writes dL/dx to dx, from g and its sums over `count` values of each channel; sums are null if the statistics do not
// depend on x. If layer->relu is 0, g is the gradient before ReLU.
void batchnorm_input_gradient(const Images* images, const Layer* layer, const void* g, const void* x,
                              const double* sums, double count, void* dx) {
  const size_t rows = images->rows, channels = images->channels;
  const Affine map = affine(layer->statistics, channels, layer->weight, layer->bias, layer->eps);
  float* terms = kept<float, 2>(2 * channels);
  std::fill(terms, terms + 2 * channels, 0.0F);
  for (size_t c = 0; c < channels && sums != nullptr; ++c) {
    const double scale = map.scale[c] / count, spread = layer->statistics[channels + c] + layer->eps;
    terms[c] = static_cast<float>(scale * sums[c]);
    terms[channels + c] = static_cast<float>(scale * sums[channels + c] / spread);
  }
  const auto run = [&]<typename T>(const T* gradient) {
    const T* input = static_cast<const T*>(x);
    T* output = static_cast<T*>(dx);
    if (layer->relu != 0) {
      input_gradient<T, Relu::kFromInput>(gradient, input, output, rows, channels, images->threads, map, terms);
    } else {
      input_gradient<T, Relu::kNone>(gradient, input, output, rows, channels, images->threads, map, terms);
    }
  };
  images->bfloat16 != 0 ? run(static_cast<const Bfloat16*>(g)) : run(static_cast<const float*>(g));
}

// Computes dL/dweight and dL/dbias from statistics and sums, each parts x 2 x channels.
void batchnorm_parameter_gradients(size_t parts, size_t channels, const double* statistics, double eps,
                                   const double* sums, float* weight_gradient, float* bias_gradient) {
  for (size_t c = 0; c < channels; ++c) {
    double weight = 0, bias = 0;
    for (size_t i = 0; i < parts; ++i) {
      const size_t at = 2 * channels * i + c;
      bias += sums[at];
      weight += sums[at + channels] / std::sqrt(statistics[at + channels] + eps);
    }
    weight_gradient[c] = static_cast<float>(weight);
    bias_gradient[c] = static_cast<float>(bias);
  }
}
}
