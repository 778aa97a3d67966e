// The kernels below torch's operators, for each type of values.

#include "operator_kernels.hpp"

#include <atomic>

#include "attention.hpp"
#include "batch_norm.hpp"
#include "depthwise.hpp"
#include "grouped.hpp"

namespace {

constexpr size_t kHalves = 1 << 12;  // values that are tested together for being finite

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

bool are_finite_halves(const void* values, size_t count, int threads) {
  const Bfloat16* const halves = static_cast<const Bfloat16*>(values);
  std::atomic<bool> finite{true};
  share((count + kHalves - 1) / kHalves, count, threads, [&](size_t block, size_t end) {
    for (; block < end && finite; ++block) {
      uint16_t largest = 0;  // without leaving the loop early, so that it is vectorized
      for (size_t i = block * kHalves; i < std::min(count, (block + 1) * kHalves); ++i) {
        largest = std::max<uint16_t>(largest, halves[i] & 0x7fff);
      }
      if (largest >= 0x7f80) finite = false;
    }
  });
  return finite;
}

void patches(const Patches& layer, const void* x, void* out) {
  const size_t lines = layer.images * layer.out_height, taps = layer.kernel[0] * layer.kernel[1];
  share(lines, lines * layer.out_width * taps * layer.channels, layer.threads, [&](size_t begin, size_t end) {
    Bfloat16* to = static_cast<Bfloat16*>(out) + begin * layer.out_width * taps * layer.channels;
    for (size_t place = begin * layer.out_width; place < end * layer.out_width; ++place) {
      const size_t column = place % layer.out_width, line = place / layer.out_width;
      const size_t image = line / layer.out_height, row = line % layer.out_height;
      for (size_t tap = 0; tap < taps; ++tap, to += layer.channels) {
        // Places above and to the left of the image wrap around to large numbers.
        const size_t i = row * layer.stride[0] + tap / layer.kernel[1] * layer.dilation[0] - layer.padding[0];
        const size_t j = column * layer.stride[1] + tap % layer.kernel[1] * layer.dilation[1] - layer.padding[1];
        if (i < layer.height && j < layer.width) {
          const size_t at = (image * layer.height + i) * layer.width + j;
          std::copy_n(static_cast<const Bfloat16*>(x) + at * layer.channels, layer.channels, to);
        } else {
          std::fill_n(to, layer.channels, Bfloat16{0});
        }
      }
    }
  });
}

void transpose_halves(const void* from, size_t rows, size_t columns, size_t step, int threads, void* to) {
  transpose(static_cast<const uint16_t*>(from), rows, columns, step, threads, static_cast<uint16_t*>(to));
}

void pair_rows(const void* from, size_t rows, size_t columns, size_t step, void* to) {
  pair_rows(static_cast<const Bfloat16*>(from), rows, columns, step, static_cast<uint32_t*>(to));
}

void pair_columns(const void* from, size_t rows, size_t columns, size_t step, void* to) {
  pair_columns(static_cast<const Bfloat16*>(from), rows, columns, step, static_cast<uint32_t*>(to));
}

void softmax_gradients(const Scores& block, const float* scores, const float* products, const float* logsumexp,
                       int64_t logsumexp_step, const void* grad, int64_t grad_step, const void* out, int64_t out_step,
                       int64_t size, void* probabilities, void* score_gradients) {
  Bfloat16 *p = static_cast<Bfloat16*>(probabilities), *ds = static_cast<Bfloat16*>(score_gradients);
  for (int64_t row = 0; row < block.rows; ++row, p += block.step, ds += block.step) {
    if (row >= block.queries) {
      std::fill(p, p + block.step, Bfloat16{0});
      std::fill(ds, ds + block.step, Bfloat16{0});
      continue;
    }
    const float delta = dot(static_cast<const Bfloat16*>(grad) + row * grad_step,
                            static_cast<const Bfloat16*>(out) + row * out_step, static_cast<size_t>(size));
    const int64_t seen = std::min(block.keys, block.first + row + 1);
    softmax_gradient(scores + row * block.keys, products + row * block.keys, static_cast<size_t>(seen),
                     static_cast<size_t>(block.step), block.scale, logsumexp[row * logsumexp_step], delta, p, ds);
  }
}

void narrow_rows(const float* from, size_t rows, size_t columns, void* to, size_t step) {
  Bfloat16* narrow = static_cast<Bfloat16*>(to);
  for (size_t row = 0; row < rows; ++row) narrow_row(from + row * columns, columns, narrow + row * step);
}
