// Backward pass: sums of the gradients, then the input gradient.

#pragma once

#include "forward.hpp"

namespace {

constexpr size_t kNearRows = 4;  // rows of images in the cache that are summed at once

// Where the activation's input is computed from: batch-norm's input, or a map of it or of the activation's output.
enum class Source { kInput, kMap };

// Returns the sum of two gradients, rounded like torch's addition.
template <typename T>
inline T added(T one, T other) {
  T sum;
  store(sum, load(one) + load(other));
  return sum;
}

// Whether the gradients before an activation are written, as a residual's gradient or to be read by the second pass.
template <Source kSource, typename Activation>
constexpr bool kWritten = kSource == Source::kMap || Activation::kCostly;

// Adds the gradients before the activation of kRows rows to sum, and their products with (x - mean) to products. Writes
// them to `before` if kWritten. With kTwo the gradient after the activation is g + h.
template <size_t kRows, Source kSource, bool kTwo, typename T, typename Activation>
void add_gradients(const T* __restrict g, const T* __restrict h, const T* __restrict x, const T* __restrict map,
                   T* __restrict before, size_t channels, const Affine& affine, const Activation activation,
                   float* __restrict sum, float* __restrict products) {
  const float *__restrict mean = affine.mean, *__restrict scale = affine.scale, *__restrict shift = affine.shift;
  INDEPENDENT
  for (size_t c = 0; c < channels; ++c) {
    float gradients = 0, multiplied = 0;
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      const size_t at = row * channels + c;
      const float difference = load(x[at]) - mean[c];
      T given = g[at];
      if constexpr (kTwo) {
        given = added(given, h[at]);
      }
      float input_or_output = 0;
      if constexpr (kSource == Source::kMap) {
        input_or_output = load(map[at]);
      } else {
        input_or_output = difference * scale[c] + shift[c];  // bitwise as in normalize_row
      }
      const float gradient = activation.gradient(load(given), input_or_output);
      if constexpr (kWritten<kSource, Activation>) {
        store(before[at], gradient);
      }
      gradients += gradient;
      multiplied += gradient * difference;
    }
    sum[c] += gradients;
    products[c] += multiplied;
  }
}

template <Source kSource, bool kTwo, typename T, typename Activation>
void gradient_sums(const T* g, const T* h, const T* x, const T* map, T* before, size_t rows, size_t channels,
                   int threads, const Affine& affine, const Activation& activation, double* out) {
  constexpr bool kMap = kSource == Source::kMap, kWrites = kWritten<kSource, Activation>;
  const Chunks chunks(rows);
  const bool cached = rows * channels * sizeof(T) < kCacheBytes;
  double* parts = kept<double, 0>(2 * channels * chunks.count);
  share(chunks.count, rows * channels, threads, [&](size_t first, size_t end) {
    float* sum = kept<float, 0>(2 * channels);
    const auto add = [&]<size_t kRows>(size_t row) {
      const size_t at = row * channels;
      add_gradients<kRows, kSource, kTwo>(g + at, kTwo ? h + at : nullptr, x + at, kMap ? map + at : nullptr,
                                          kWrites ? before + at : nullptr, channels, affine, activation, sum,
                                          sum + channels);
    };
    for (size_t i = first; i < end; ++i) {
      double* part = parts + 2 * channels * i;
      std::fill(part, part + 2 * channels, 0.0);
      const size_t begin = chunks.first(i), stop = begin + chunks.length(i);
      for (size_t block = begin; block < stop; block += kBlock) {
        const size_t block_end = std::min(block + kBlock, stop);
        std::fill(sum, sum + 2 * channels, 0.0F);
        size_t row = block;
        for (; cached && row + kNearRows <= block_end; row += kNearRows) {
          add.template operator()<kNearRows>(row);
        }
        for (; row < block_end; ++row) {
          add.template operator()<1>(row);
        }
        for (size_t c = 0; c < 2 * channels; ++c) {
          part[c] += sum[c];
        }
      }
    }
  });
  std::fill(out, out + 2 * channels, 0.0);
  for (size_t i = 0; i < chunks.count; ++i) {
    for (size_t c = 0; c < 2 * channels; ++c) {
      out[c] += parts[2 * channels * i + c];
    }
  }
}

// dx = scale g - mean_term - (x - mean) product_term, with g before the activation.
template <typename T, typename Activation>
void input_gradient_row(const T* __restrict g, const T* __restrict x, T* __restrict dx, size_t channels,
                        const Affine& map, const Activation activation, const float* __restrict mean_term,
                        const float* __restrict product_term) {
  const float *__restrict mean = map.mean, *__restrict scale = map.scale, *__restrict shift = map.shift;
  INDEPENDENT
  for (size_t c = 0; c < channels; ++c) {
    const float difference = load(x[c]) - mean[c];
    const float gradient = activation.gradient(load(g[c]), difference * scale[c] + shift[c]);
    store(dx[c], (gradient * scale[c] - mean_term[c]) - difference * product_term[c]);
  }
}

template <typename T, typename Activation>
void input_gradient(const T* g, const T* x, T* dx, size_t rows, size_t channels, int threads, const Affine& map,
                    const Activation& activation, const float* terms) {
  const Chunks chunks(rows);
  share(chunks.count, rows * channels, threads, [&](size_t first, size_t end) {
    for (size_t i = end; i-- > first;) {
      const size_t begin = chunks.first(i);
      for (size_t row = begin; row < begin + chunks.length(i); ++row) {
        const size_t at = row * channels;
        input_gradient_row(g + at, x + at, dx + at, channels, map, activation, terms, terms + channels);
      }
    }
  });
}

}  // namespace
