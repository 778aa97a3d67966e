// Backward pass: sums of the gradients, then the input gradient.

#pragma once

#include "forward.hpp"

namespace {

// How the gradient before ReLU is computed from the one after it.
enum class Relu { kNone, kFromInput, kFromOutput };

template <typename T, Relu kRelu>
inline T before_relu(T gradient, float difference, float scale, float shift, const T* y) {
  if constexpr (kRelu == Relu::kFromInput) {
    return difference * scale + shift <= 0 ? T{} : gradient;  // bitwise as in normalize_row
  } else if constexpr (kRelu == Relu::kFromOutput) {
    return load(*y) <= 0 ? T{} : gradient;
  } else {
    return gradient;
  }
}

// Returns the sum of two gradients, rounded like torch's addition.
template <typename T>
inline T added(T one, T other) {
  T sum;
  store(sum, load(one) + load(other));
  return sum;
}

// Adds a row's gradients before ReLU to sum, and their products with (x - mean) to products. Writes them to `before` if
// ReLU is determined from the output. With kTwo the gradient after ReLU is g + h.
template <typename T, Relu kRelu, bool kTwo>
void add_gradients(const T* __restrict g, const T* __restrict h, const T* __restrict x, const T* __restrict y,
                   T* __restrict before, size_t channels, const Affine& map, float* __restrict sum,
                   float* __restrict products) {
  const float *__restrict mean = map.mean, *__restrict scale = map.scale, *__restrict shift = map.shift;
  INDEPENDENT
  for (size_t c = 0; c < channels; ++c) {
    const float difference = load(x[c]) - mean[c];
    T given = g[c];
    if constexpr (kTwo) {
      given = added(given, h[c]);
    }
    const T cut = before_relu<T, kRelu>(given, difference, scale[c], shift[c], y + c);
    if constexpr (kRelu == Relu::kFromOutput) {
      before[c] = cut;
    }
    const float gradient = load(cut);
    sum[c] += gradient;
    products[c] += gradient * difference;
  }
}

template <typename T, Relu kRelu, bool kTwo>
void gradient_sums(const T* g, const T* h, const T* x, const T* y, T* before, size_t rows, size_t channels, int threads,
                   const Affine& map, double* out) {
  const Chunks chunks(rows);
  double* parts = kept<double, 0>(2 * channels * chunks.count);
  share(chunks.count, rows * channels, threads, [&](size_t first, size_t end) {
    float* sum = kept<float, 0>(2 * channels);
    float* products = sum + channels;
    for (size_t i = first; i < end; ++i) {
      double* part = parts + 2 * channels * i;
      std::fill(part, part + 2 * channels, 0.0);
      const size_t begin = chunks.first(i), stop = begin + chunks.length(i);
      for (size_t block = begin; block < stop; block += kBlock) {
        const size_t block_end = std::min(block + kBlock, stop);
        std::fill(sum, sum + 2 * channels, 0.0F);
        for (size_t row = block; row < block_end; ++row) {
          const size_t at = row * channels;
          constexpr bool kOutput = kRelu == Relu::kFromOutput;
          add_gradients<T, kRelu, kTwo>(g + at, kTwo ? h + at : nullptr, x + at, kOutput ? y + at : nullptr,
                                        kOutput ? before + at : nullptr, channels, map, sum, products);
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

// dx = scale g - mean_term - (x - mean) product_term.
template <typename T, Relu kRelu>
void input_gradient_row(const T* __restrict g, const T* __restrict x, T* __restrict dx, size_t channels,
                        const Affine& map, const float* __restrict mean_term, const float* __restrict product_term) {
  const float *__restrict mean = map.mean, *__restrict scale = map.scale, *__restrict shift = map.shift;
  INDEPENDENT
  for (size_t c = 0; c < channels; ++c) {
    const float difference = load(x[c]) - mean[c];
    const float gradient = load(before_relu<T, kRelu>(g[c], difference, scale[c], shift[c], nullptr));
    store(dx[c], (gradient * scale[c] - mean_term[c]) - difference * product_term[c]);
  }
}

template <typename T, Relu kRelu>
void input_gradient(const T* g, const T* x, T* dx, size_t rows, size_t channels, int threads, const Affine& map,
                    const float* terms) {
  const Chunks chunks(rows);
  share(chunks.count, rows * channels, threads, [&](size_t first, size_t end) {
    for (size_t i = end; i-- > first;) {
      const size_t begin = chunks.first(i);
      for (size_t row = begin; row < begin + chunks.length(i); ++row) {
        const size_t at = row * channels;
        input_gradient_row<T, kRelu>(g + at, x + at, dx + at, channels, map, terms, terms + channels);
      }
    }
  });
}

}  // namespace
