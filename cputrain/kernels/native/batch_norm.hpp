// Batch-norm in training: outputs in two passes over the images, gradients in two over images and outputs' gradients.
//
// Images that may still be in the cache are summed by columns of channels, in registers; larger ones row by row, as
// memory is read fastest. Sums are in chunks of rows that do not depend on the number of threads.

#pragma once

#include "backward.hpp"
#include "operator_kernels.hpp"
#include "vectors.hpp"

namespace {

constexpr size_t kNearBytes = 4 << 20;   // images of fewer bytes are summed by columns
constexpr size_t kFewChannels = 128;   // of which some rows stay in a core's first cache
constexpr size_t kRegisterRows = 8;    // rows of few channels that are summed in registers
constexpr size_t kStreams = 4;         // the same, of more channels
constexpr size_t kFewRows = 1024;      // of which each sum in registers is added in double

struct TwoVectors {
  Vector first, second;
};

struct TwoFloats {
  float first, second;
};

// Adds to sums[c] and sums[channels + c] the sums over rows of the two values of kCount vectors from channel c on that
// `terms(place, channel)` returns for the values at this place of the images.
template <size_t kCount, typename Terms>
void add_columns(size_t begin, size_t end, size_t channels, size_t c, const Terms& terms, float* sums) {
  Vector one[kCount]{}, two[kCount]{};
  for (size_t row = begin; row < end; ++row) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kCount; ++v) {
      const TwoVectors made = terms(row * channels + c + v * kWidth, c + v * kWidth);
      one[v] += made.first;
      two[v] += made.second;
    }
  }
  for (size_t v = 0; v < kCount; ++v) {
    write(sums + c + v * kWidth, read(sums + c + v * kWidth) + one[v]);
    write(sums + channels + c + v * kWidth, read(sums + channels + c + v * kWidth) + two[v]);
  }
}

// Does the same for the channels from c on, fewer than a vector has: the vector that ends with them begins before.
template <typename Terms>
void add_last_columns(size_t begin, size_t end, size_t channels, size_t c, const Terms& terms, float* sums) {
  const size_t start = channels - kWidth;
  Vector one{}, two{};
  for (size_t row = begin; row < end; ++row) {
    const TwoVectors made = terms(row * channels + start, start);
    one += made.first;
    two += made.second;
  }
  for (; c < channels; ++c) {
    sums[c] += one[c - start];
    sums[channels + c] += two[c - start];
  }
}

// Does the same for all channels. `term(place, channel)` returns the two values of a single place.
template <typename Terms, typename Term>
void add_rows(size_t begin, size_t end, size_t channels, const Terms& terms, const Term& term, float* sums) {
  size_t c = 0;
  for (; c + 4 * kWidth <= channels; c += 4 * kWidth) add_columns<4>(begin, end, channels, c, terms, sums);
  for (; c + kWidth <= channels; c += kWidth) add_columns<1>(begin, end, channels, c, terms, sums);
  if (c < channels && channels > kWidth) add_last_columns(begin, end, channels, c, terms, sums), c = channels;
  for (; c < channels; ++c) {
    TwoFloats all{};
    for (size_t row = begin; row < end; ++row) {
      const TwoFloats made = term(row * channels + c, c);
      all.first += made.first;
      all.second += made.second;
    }
    sums[c] += all.first;
    sums[channels + c] += all.second;
  }
}

// Returns the sums of each chunk, 2 x channels, in memory that is kept. `work(begin, end, chunk's first row, sums)`
// adds those of some rows.
template <typename Work>
const double* chunk_sums(const Chunks& chunks, size_t channels, int threads, const Work& work) {
  double* parts = kept<double, 0>(2 * channels * chunks.count);
  const size_t step = channels < kFewChannels ? kRegisterRows : kStreams;
  const size_t rows = chunks.rows < kFewRows ? step : kBlock;
  share(chunks.count, chunks.rows * channels, threads, [&](size_t first, size_t end) {
    float* sums = kept<float, 0>(2 * channels);
    for (size_t i = first; i < end; ++i) {
      double* part = parts + 2 * channels * i;
      std::fill(part, part + 2 * channels, 0.0);
      const size_t from = chunks.first(i), stop = from + chunks.length(i);
      for (size_t block = from; block < stop; block += rows) {
        const size_t block_end = std::min(block + rows, stop);
        std::fill(sums, sums + 2 * channels, 0.0F);
        for (size_t row = block; row < block_end; row += step) work(row, std::min(row + step, block_end), from, sums);
        for (size_t c = 0; c < 2 * channels; ++c) part[c] += sums[c];
      }
    }
  });
  return parts;
}

// Writes each channel's mean and biased variance to out. Differences are taken from the first row of each chunk: if it
// is far from the mean, the variance is large too, and the subtraction below is accurate.
template <typename T>
void batch_statistics(const T* x, size_t rows, size_t channels, int threads, double* out) {
  if (rows * channels * sizeof(T) >= kNearBytes) return statistics(x, rows, channels, threads, out);
  const Chunks chunks(rows);
  const double* parts = chunk_sums(chunks, channels, threads, [&](size_t begin, size_t end, size_t from, float* sums) {
    const T* pivot = x + from * channels;
    add_rows(
        begin, end, channels,
        [&](size_t at, size_t c) {
          const Vector difference = read(x + at) - read(pivot + c);
          return TwoVectors{difference, difference * difference};
        },
        [&](size_t at, size_t c) {
          const float difference = load(x[at]) - load(pivot[c]);
          return TwoFloats{difference, difference * difference};
        },
        sums);
  });
  for (size_t c = 0; c < channels; ++c) {
    double mean = 0, squares = 0;
    for (size_t i = 0; i < chunks.count; ++i) {
      const double length = static_cast<double>(chunks.length(i));
      mean += parts[2 * channels * i + c] + length * load(x[chunks.first(i) * channels + c]);
    }
    mean /= static_cast<double>(chunks.rows);
    for (size_t i = 0; i < chunks.count; ++i) {
      const double *part = parts + 2 * channels * i + c, length = static_cast<double>(chunks.length(i));
      const double away = part[0] / length + load(x[chunks.first(i) * channels + c]) - mean;
      squares += part[channels] - part[0] * part[0] / length + length * away * away;
    }
    const double variance = squares / static_cast<double>(chunks.rows);
    out[c] = mean;
    out[channels + c] = variance < 0 ? 0 : variance;  // keeps NaN
  }
}

// Writes the sums over rows of g, and of its product with (x - mean), to out.
template <typename T>
void batch_gradient_sums(const T* g, const T* x, const float* mean, size_t rows, size_t channels, int threads,
                         double* out) {
  if (rows * channels * sizeof(T) >= kNearBytes) {
    const Affine map{mean, mean, mean};  // without an activation scale and shift do not matter
    return gradient_sums<Source::kInput, false, T>(g, nullptr, x, nullptr, nullptr, rows, channels, threads, map,
                                                   NoActivation{}, out);
  }
  const Chunks chunks(rows);
  const double* parts = chunk_sums(chunks, channels, threads, [&](size_t begin, size_t end, size_t, float* sums) {
    add_rows(
        begin, end, channels,
        [&](size_t at, size_t c) {
          const Vector gradient = read(g + at);
          return TwoVectors{gradient, gradient * (read(x + at) - read(mean + c))};
        },
        [&](size_t at, size_t c) {
          const float gradient = load(g[at]);
          return TwoFloats{gradient, gradient * (load(x[at]) - mean[c])};
        },
        sums);
  });
  std::fill(out, out + 2 * channels, 0.0);
  for (size_t i = 0; i < chunks.count; ++i) {
    for (size_t c = 0; c < 2 * channels; ++c) out[c] += parts[2 * channels * i + c];
  }
}

template <typename T>
void batch_norm_forward(const NormRows& values, const NormParameters& parameters, double eps, double momentum,
                        const T* x, T* y, float* mean, float* inverse, float* running_mean, float* running_variance) {
  const size_t rows = values.rows, channels = values.channels;
  double* found = kept<double, 1>(2 * channels);
  batch_statistics(x, rows, channels, values.threads, found);
  const double *means = found, *variances = found + channels, count = static_cast<double>(rows);
  for (size_t c = 0; c < channels; ++c) {
    mean[c] = static_cast<float>(means[c]);
    inverse[c] = static_cast<float>(1 / std::sqrt(variances[c] + eps));
  }
  for (size_t c = 0; c < channels && running_mean != nullptr; ++c) {
    running_mean[c] = static_cast<float>(momentum * means[c] + (1 - momentum) * running_mean[c]);
  }
  for (size_t c = 0; c < channels && running_variance != nullptr; ++c) {
    const double unbiased = variances[c] * count / (count - 1);
    running_variance[c] = static_cast<float>(momentum * unbiased + (1 - momentum) * running_variance[c]);
  }
  const Affine map = affine(found, channels, parameters.weight, parameters.bias, eps);
  normalize<false, false, T>(x, nullptr, nullptr, y, rows, channels, values.threads, map, NoActivation{});
}

template <typename T>
void batch_norm_backward(const NormRows& values, const NormParameters& parameters, const float* mean,
                         const float* inverse, const T* g, const T* x, T* dx, float* dweight, float* dbias) {
  const size_t rows = values.rows, channels = values.channels;
  double* sums = kept<double, 1>(2 * channels);
  float* scale = kept<float, 1>(3 * channels);
  float *mean_term = scale + channels, *product_term = mean_term + channels;
  const double* products = sums + channels;
  batch_gradient_sums(g, x, mean, rows, channels, values.threads, sums);
  for (size_t c = 0; c < channels; ++c) {
    const double spread = inverse[c], exact = (parameters.weight != nullptr ? parameters.weight[c] : 1.0) * spread;
    scale[c] = static_cast<float>(exact);
    mean_term[c] = static_cast<float>(exact * sums[c] / static_cast<double>(rows));
    product_term[c] = static_cast<float>(exact * products[c] * spread * spread / static_cast<double>(rows));
    if (dweight != nullptr) dweight[c] = static_cast<float>(products[c] * spread);
    if (dbias != nullptr) dbias[c] = static_cast<float>(sums[c]);
  }
  const Affine map{mean, scale, mean};  // without an activation the shift does not matter
  if (dx != nullptr) input_gradient(g, x, dx, rows, channels, values.threads, map, NoActivation{}, mean_term);
}

}  // namespace
