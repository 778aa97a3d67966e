// Forward pass: statistics of the rows, then normalization, residual and activation.

#pragma once

#include <cmath>

#include "activations.hpp"
#include "rows.hpp"
#include "values.hpp"

namespace {

// Adds the differences of a row from the pivot to sum, and their squares to squares.
template <typename T>
void add_differences(const T* __restrict x, size_t channels, const float* __restrict pivot, float* __restrict sum,
                     float* __restrict squares) {
  INDEPENDENT
  for (size_t c = 0; c < channels; ++c) {
    const float difference = load(x[c]) - pivot[c];
    sum[c] += difference;
    squares[c] += difference * difference;
  }
}

// Does the same for 4 rows at once, with fewer reads and writes of the sums.
template <typename T>
void add_differences4(const T* __restrict x, size_t channels, const float* __restrict pivot, float* __restrict sum,
                      float* __restrict squares) {
  INDEPENDENT
  for (size_t c = 0; c < channels; ++c) {
    const float a = load(x[c]) - pivot[c], b = load(x[channels + c]) - pivot[c];
    const float d = load(x[2 * channels + c]) - pivot[c], e = load(x[3 * channels + c]) - pivot[c];
    sum[c] += (a + b) + (d + e);
    squares[c] += (a * a + b * b) + (d * d + e * e);
  }
}

// Computes each channel's mean and sum of squared differences from it over a chunk. Differences are taken from the
// chunk's first row: if it is far from the mean, the variance is large too, and the subtraction below is accurate.
template <typename T>
void chunk_statistics(const T* x, size_t rows, size_t channels, bool cached, double* __restrict mean,
                      double* __restrict squares) {
  float* pivot = kept<float, 0>(3 * channels);
  float *sum = pivot + channels, *sum2 = sum + channels;
  for (size_t c = 0; c < channels; ++c) {
    pivot[c] = load(x[c]);
    mean[c] = squares[c] = 0;
  }
  for (size_t begin = 0; begin < rows; begin += kBlock) {
    const size_t end = std::min(begin + kBlock, rows);
    std::fill(sum, sum2 + channels, 0.0F);
    size_t row = begin;
    for (; cached && row + 4 <= end; row += 4) {
      add_differences4(x + row * channels, channels, pivot, sum, sum2);
    }
    for (; row < end; ++row) {
      add_differences(x + row * channels, channels, pivot, sum, sum2);
    }
    for (size_t c = 0; c < channels; ++c) {
      mean[c] += sum[c];
      squares[c] += sum2[c];
    }
  }
  for (size_t c = 0; c < channels; ++c) {
    const double difference = mean[c] / static_cast<double>(rows);
    squares[c] -= mean[c] * difference;
    mean[c] = difference + pivot[c];
  }
}

// Writes each channel's mean and biased variance to out.
template <typename T>
void statistics(const T* x, size_t rows, size_t channels, int threads, double* out) {
  const Chunks chunks(rows);
  const bool cached = rows * channels * sizeof(T) < kCacheBytes;
  double* parts = kept<double, 0>(2 * channels * chunks.count);
  share(chunks.count, rows * channels, threads, [&](size_t first, size_t end) {
    for (size_t i = first; i < end; ++i) {
      double* part = parts + 2 * channels * i;
      chunk_statistics(x + chunks.first(i) * channels, chunks.length(i), channels, cached, part, part + channels);
    }
  });
  double *mean = out, *variance = out + channels;
  std::fill(out, out + 2 * channels, 0.0);
  for (size_t i = 0; i < chunks.count; ++i) {
    const double weight = static_cast<double>(chunks.length(i)) / static_cast<double>(rows);
    for (size_t c = 0; c < channels; ++c) {
      mean[c] += weight * parts[2 * channels * i + c];
    }
  }
  for (size_t i = 0; i < chunks.count; ++i) {
    const double length = static_cast<double>(chunks.length(i));
    const double *part_mean = parts + 2 * channels * i, *squares = part_mean + channels;
    for (size_t c = 0; c < channels; ++c) {
      const double away = part_mean[c] - mean[c];
      variance[c] += (squares[c] + length * away * away) / static_cast<double>(rows);
    }
  }
  for (size_t c = 0; c < channels; ++c) {
    variance[c] = variance[c] < 0 ? 0 : variance[c];  // keeps NaN
  }
}

// The map from x to (x - mean) scale + shift.
struct Affine {
  const float *mean, *scale, *shift;
};

Affine affine(const double* statistics, size_t channels, const float* weight, const float* bias, double eps) {
  float* mean = kept<float, 1>(3 * channels);
  float *scale = mean + channels, *shift = scale + channels;
  for (size_t c = 0; c < channels; ++c) {
    const double exact = (weight != nullptr ? weight[c] : 1.0) / std::sqrt(statistics[channels + c] + eps);
    mean[c] = static_cast<float>(statistics[c]);
    scale[c] = static_cast<float>(exact);
    // compensates for the rounding of the mean to float
    shift[c] = static_cast<float>((bias != nullptr ? bias[c] : 0.0) + exact * (mean[c] - statistics[c]));
  }
  return {mean, scale, shift};
}

// Writes the activation of the normalized row plus the residual to y, and its input to `before` with kBefore.
template <bool kResidual, bool kBefore, typename T, typename Activation>
void normalize_row(const T* __restrict x, const T* __restrict residual, T* __restrict before, T* __restrict y,
                   size_t channels, const Affine& map, const Activation activation) {
  const float *__restrict mean = map.mean, *__restrict scale = map.scale, *__restrict shift = map.shift;
  INDEPENDENT
  for (size_t c = 0; c < channels; ++c) {
    float value = (load(x[c]) - mean[c]) * scale[c] + shift[c];
    if constexpr (kResidual) {
      value += load(residual[c]);
    }
    if constexpr (kBefore) {
      store(before[c], value);
    }
    store(y[c], activation.value(value));
  }
}

template <bool kResidual, bool kBefore, typename T, typename Activation>
void normalize(const T* x, const T* residual, T* before, T* y, size_t rows, size_t channels, int threads,
               const Affine& map, const Activation& activation) {
  const Chunks chunks(rows);
  share(chunks.count, rows * channels, threads, [&](size_t first, size_t end) {
    for (size_t i = end; i-- > first;) {  // backwards: the last chunks are still in the cache
      const size_t begin = chunks.first(i);
      for (size_t row = begin; row < begin + chunks.length(i); ++row) {
        const size_t at = row * channels;
        normalize_row<kResidual, kBefore>(x + at, kResidual ? residual + at : nullptr,
                                          kBefore ? before + at : nullptr, y + at, channels, map, activation);
      }
    }
  });
}

}  // namespace
