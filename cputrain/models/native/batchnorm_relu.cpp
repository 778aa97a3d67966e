// Batch-norm, the addition of a residual and ReLU, forward and backward, each in two passes over the images.
//
// Plain C functions for ctypes. Images are channels-last: `rows` = images x height x width rows of `channels` values,
// float32 or bfloat16. Parameters are float32, or null for 1 and 0; statistics and sums are double.
//
// Sums are taken over chunks of rows that do not depend on the number of threads, and added in their order: any number
// of threads computes the same bits. Whether ReLU has cut a value is computed again from the input, or seen in the
// output where a residual was added, so that no mask is kept.

#include "backward.hpp"

extern "C" {

// Images of one layer: bfloat16 or float32, and the threads to use.
struct Images {
  size_t rows, channels;
  int bfloat16, threads;
};

// A layer's parameters, the statistics (mean, variance) that it normalizes by, and whether ReLU follows.
struct Layer {
  const double* statistics;
  const float *weight, *bias;
  double eps;
  int relu;
};

// Whether torch's OpenMP runtime can be reached.
int batchnorm_has_threads() {
  return GOMP_parallel != nullptr && omp_get_thread_num != nullptr && omp_get_num_threads != nullptr;
}

// The mean and variance of each channel into out, 2 x channels.
void batchnorm_statistics(const Images* images, const void* x, double* out) {
  const auto run = [&]<typename T>(const T* input) {
    statistics(input, images->rows, images->channels, images->threads, out);
  };
  images->bfloat16 != 0 ? run(static_cast<const Bfloat16*>(x)) : run(static_cast<const float*>(x));
}

// running = (1 - momentum) running + momentum statistics, the mean over `parts` of a batch that are normalized each by
// its own (parts x 2 x channels); `counts` are the values of a channel in each, which correct the variance.
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

// For g = dL/dy: the sums over rows of g before ReLU and of its product with (x - mean) into out, 2 x channels. With an
// output y, whose sign then tells what ReLU cut, g before ReLU is written to `before`: the residual's gradient. There
// dL/dy may be the sum of two, g and h; h is null otherwise.
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

// dL/dx into dx, from g and its sums over `count` values of each channel; sums are null where the statistics do not
// depend on x. g is before ReLU where layer->relu is 0.
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

// dL/dweight and dL/dbias from the sums of `parts` (parts x 2 x channels each).
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
