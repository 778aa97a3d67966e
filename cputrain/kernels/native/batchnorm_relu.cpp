// Batch-norm fused with residual addition and activation, forward and backward, each in two passes over the images.
//
// Plain C functions for ctypes. Images are channels-last: `rows` = images x height x width rows of `channels` values,
// float32 or bfloat16. Parameters are float32, or null for 1 and 0; statistics and sums are double.
//
// Sums are taken over chunks of rows that do not depend on the number of threads, and added in a fixed order, so that
// results are bitwise equal for any number of threads. The backward pass recomputes the activation's input. If a residual
// was added, it reads a map instead: the outputs, or where they do not tell the derivative, the activation's input.

#include <type_traits>

#include "backward.hpp"

namespace {

// Images of one layer: sizes, data type and number of threads. They are normalized in `parts` ghost batches, the first
// of which may have an image more than the last, each with its own statistics and sums.
struct Images {
  size_t images, pixels, channels, parts;
  int bfloat16, threads;
};

// Activations, in the order of their numbers in activations.py.
enum ActivationNumber { kNone, kRelu, kRelu6, kLeakyRelu, kHardswish, kSilu };

// A layer's parameters, the statistics (mean, variance) it normalizes by, and the activation that follows, with
// LeakyReLU's slope.
struct Layer {
  const double* statistics;
  const float *weight, *bias;
  double eps;
  int activation;
  float slope;
};

Affine affine_of(const Layer& layer, size_t channels, size_t part) {
  return affine(layer.statistics + 2 * channels * part, channels, layer.weight, layer.bias, layer.eps);
}

// Calls work(activation) with the layer's activation.
template <typename Work>
void with_activation(const Layer& layer, const Work& work) {
  switch (layer.activation) {
    case kRelu: return work(Relu{});
    case kRelu6: return work(Relu6{});
    case kLeakyRelu: return work(LeakyRelu{layer.slope});
    case kHardswish: return work(Hardswish{});
    case kSilu: return work(Silu{});
    default: return work(NoActivation{});
  }
}

// Calls work(part, first, rows) for the rows of each ghost batch, from value `first` of the images on.
template <typename Work>
void for_parts(const Images& images, const Work& work) {
  const size_t fewest = images.images / images.parts, more = images.images % images.parts;
  for (size_t part = 0, first = 0; part < images.parts; ++part) {
    const size_t rows = (fewest + (part < more ? 1 : 0)) * images.pixels;
    work(part, first, rows);
    first += rows * images.channels;
  }
}

template <typename T>
T* at(T* values, size_t place) {
  return values == nullptr ? nullptr : values + place;
}

}  // namespace

extern "C" {

// Returns whether torch's OpenMP runtime is visible.
int batchnorm_has_threads() {
  return GOMP_parallel != nullptr && omp_get_thread_num != nullptr && omp_get_num_threads != nullptr;
}

// Writes the mean and variance of each channel to out, parts x 2 x channels.
void batchnorm_statistics(const Images* images, const void* x, double* out) {
  const size_t channels = images->channels;
  const auto run = [&]<typename T>(const T* input) {
    for_parts(*images, [&](size_t part, size_t first, size_t rows) {
      statistics(input + first, rows, channels, images->threads, out + 2 * channels * part);
    });
  };
  images->bfloat16 != 0 ? run(static_cast<const Bfloat16*>(x)) : run(static_cast<const float*>(x));
}

// running = (1 - momentum) running + momentum mean(statistics), with the mean over the parts. Variances are made unbiased
// by `count`, the number of values of each channel, or by that of the images if it is 0.
void batchnorm_update_running(const Images* images, const double* statistics, double count, double momentum,
                              float* running_mean, float* running_variance) {
  const size_t channels = images->channels;
  const double parts = static_cast<double>(images->parts);
  double *mean = kept<double, 1>(2 * channels), *variance = mean + channels;
  std::fill(mean, mean + 2 * channels, 0.0);
  for_parts(*images, [&](size_t part, size_t, size_t rows) {
    const double values = count > 0 ? count : static_cast<double>(rows), *own = statistics + 2 * channels * part;
    for (size_t c = 0; c < channels; ++c) {
      mean[c] += own[c] / parts;
      variance[c] += own[channels + c] * (values / (values - 1)) / parts;
    }
  });
  for (size_t c = 0; c < channels; ++c) {
    running_mean[c] = static_cast<float>(running_mean[c] + momentum * (mean[c] - running_mean[c]));
    running_variance[c] = static_cast<float>(running_variance[c] + momentum * (variance[c] - running_variance[c]));
  }
}

// y = activation((x - mean) / sqrt(variance + eps) weight + bias + residual); residual may be null. The activation's
// input is written to `before` unless that is null.
void batchnorm_forward(const Images* images, const Layer* layer, const void* x, const void* residual, void* before,
                       void* y) {
  const size_t channels = images->channels;
  const auto run = [&]<typename T>(const T* input) {
    const T* added = static_cast<const T*>(residual);
    T *of_activation = static_cast<T*>(before), *output = static_cast<T*>(y);
    with_activation(*layer, [&](const auto& activation) {
      for_parts(*images, [&](size_t part, size_t first, size_t rows) {
        const Affine map = affine_of(*layer, channels, part);
        const auto as = [&]<bool kResidual, bool kBefore>() {
          normalize<kResidual, kBefore>(input + first, at(added, first), at(of_activation, first), output + first, rows,
                                        channels, images->threads, map, activation);
        };
        if (residual == nullptr) {
          as.template operator()<false, false>();
        } else if (before == nullptr) {
          as.template operator()<true, false>();
        } else if constexpr (!std::remove_cvref_t<decltype(activation)>::kKeepsOutput) {
          as.template operator()<true, true>();
        }
      });
    });
  };
  images->bfloat16 != 0 ? run(static_cast<const Bfloat16*>(x)) : run(static_cast<const float*>(x));
}

// With g = dL/dy, writes the sums over rows of g before the activation and of its product with (x - mean) to out, parts x
// 2 x channels. If a map is given that shows the activation's derivative, or if the activation is costly, g before it, the
// residual's gradient, is written to `before`. With ReLU and a map, dL/dy may be the sum of g and h; otherwise h is null.
void batchnorm_gradient_sums(const Images* images, const Layer* layer, const void* g, const void* h, const void* x,
                             const void* map, void* before, double* out) {
  const size_t channels = images->channels;
  const auto run = [&]<typename T>(const T* gradient) {
    const T *second = static_cast<const T*>(h), *input = static_cast<const T*>(x), *shown = static_cast<const T*>(map);
    T* to = static_cast<T*>(before);
    with_activation(*layer, [&]<typename Activation>(const Activation& activation) {
      for_parts(*images, [&](size_t part, size_t first, size_t rows) {
        const Affine affine = affine_of(*layer, channels, part);
        const auto as = [&]<Source kSource, bool kTwo>() {
          gradient_sums<kSource, kTwo>(gradient + first, at(second, first), input + first, at(shown, first),
                                       at(to, first), rows, channels, images->threads, affine, activation,
                                       out + 2 * channels * part);
        };
        if (map == nullptr) {
          as.template operator()<Source::kInput, false>();
        } else if constexpr (std::is_same_v<Activation, Relu>) {
          h == nullptr ? as.template operator()<Source::kMap, false>() : as.template operator()<Source::kMap, true>();
        } else if constexpr (!std::is_same_v<Activation, NoActivation>) {
          as.template operator()<Source::kMap, false>();
        }
      });
    });
  };
  images->bfloat16 != 0 ? run(static_cast<const Bfloat16*>(g)) : run(static_cast<const float*>(g));
}

// Writes dL/dx to dx, from g and its sums over `count` values of each channel, or those of the images if it is 0; sums
// are null if the statistics do not depend on x. Without an activation of the layer, g is the gradient before it.
void batchnorm_input_gradient(const Images* images, const Layer* layer, const void* g, const void* x,
                              const double* sums, double count, void* dx) {
  const size_t channels = images->channels;
  float* terms = kept<float, 2>(2 * channels);
  const auto run = [&]<typename T>(const T* gradient) {
    const T* input = static_cast<const T*>(x);
    T* output = static_cast<T*>(dx);
    with_activation(*layer, [&](const auto& activation) {
      for_parts(*images, [&](size_t part, size_t first, size_t rows) {
        const Affine map = affine_of(*layer, channels, part);
        const double* spreads = layer->statistics + 2 * channels * part + channels;
        const double values = count > 0 ? count : static_cast<double>(rows);
        std::fill(terms, terms + 2 * channels, 0.0F);
        for (size_t c = 0; c < channels && sums != nullptr; ++c) {
          const double scale = map.scale[c] / values, *own = sums + 2 * channels * part;
          terms[c] = static_cast<float>(scale * own[c]);
          terms[channels + c] = static_cast<float>(scale * own[channels + c] / (spreads[c] + layer->eps));
        }
        input_gradient(gradient + first, input + first, output + first, rows, channels, images->threads, map,
                       activation, terms);
      });
    });
  };
  images->bfloat16 != 0 ? run(static_cast<const Bfloat16*>(g)) : run(static_cast<const float*>(g));
}

// Computes dL/dweight and dL/dbias from the sums of all parts.
void batchnorm_parameter_gradients(const Images* images, const Layer* layer, const double* sums, float* weight_gradient,
                                   float* bias_gradient) {
  const size_t channels = images->channels;
  for (size_t c = 0; c < channels; ++c) {
    double weight = 0, bias = 0;
    for (size_t part = 0; part < images->parts; ++part) {
      const size_t own = 2 * channels * part + c;
      bias += sums[own];
      weight += sums[own + channels] / std::sqrt(layer->statistics[own + channels] + layer->eps);
    }
    weight_gradient[c] = static_cast<float>(weight);
    bias_gradient[c] = static_cast<float>(bias);
  }
}
}
