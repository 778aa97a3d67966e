// Depthwise convolutions by 3 x 3 kernels, stride 1 or 2: outputs from the images where they are, all channels of four
// neighboring outputs at a time. Taps outside an image read zeros, so that weights must be finite.

#pragma once

#include "operator_kernels.hpp"
#include "rows.hpp"
#include "vectors.hpp"

namespace {

constexpr size_t kSide = 3, kNeighbors = 4;

// Whether a layer is one of them.
inline bool is_direct(const DepthwiseConvolution& l) {
  const bool small = l.kernel[0] == kSide && l.kernel[1] == kSide && l.dilation[0] == 1 && l.dilation[1] == 1;
  return small && l.stride[0] == l.stride[1] && l.stride[0] <= 2;
}

// Adds the products of an input and the weights of its row to the outputs that read it.
template <size_t kStride, typename Value>
inline void add_input(size_t column, Value input, const Value (&weights)[kSide], Value (&sums)[kNeighbors]) {
#pragma GCC unroll 3
  for (size_t s = 0; s < kSide; ++s) {
    if (column >= s && (column - s) % kStride == 0 && (column - s) / kStride < kNeighbors) {
      sums[(column - s) / kStride] += input * weights[s];
    }
  }
}

// Writes `count` neighboring outputs, whose inputs are at `from` (kSide rows of columns). Weights are (tap, channel).
template <size_t kStride, typename T>
[[gnu::noinline]] void direct_outputs(const T* const* from, const float* weights, const float* bias, size_t channels,
                                      size_t count, T* out) {
  constexpr size_t kColumns = (kNeighbors - 1) * kStride + kSide;
  size_t c = 0;
  for (; c + kWidth <= channels; c += kWidth) {
    Vector sums[kNeighbors];
    std::ranges::fill(sums, bias == nullptr ? Vector{} : read(bias + c));
#pragma GCC unroll 3
    for (size_t r = 0; r < kSide; ++r) {
      Vector of_row[kSide];
      for (size_t s = 0; s < kSide; ++s) of_row[s] = read(weights + (r * kSide + s) * channels + c);
#pragma GCC unroll 9
      for (size_t column = 0; column < kColumns; ++column) {
        add_input<kStride>(column, read(from[r * kColumns + column] + c), of_row, sums);
      }
    }
    for (size_t p = 0; p < count; ++p) write(out + p * channels + c, sums[p]);
  }
  for (; c < channels; ++c) {
    float sums[kNeighbors];
    std::ranges::fill(sums, bias == nullptr ? 0.0F : bias[c]);
    for (size_t r = 0; r < kSide; ++r) {
      float of_row[kSide];
      for (size_t s = 0; s < kSide; ++s) of_row[s] = weights[(r * kSide + s) * channels + c];
      for (size_t column = 0; column < kColumns; ++column) {
        add_input<kStride>(column, load(from[r * kColumns + column][c]), of_row, sums);
      }
    }
    for (size_t p = 0; p < count; ++p) store(out[p * channels + c], sums[p]);
  }
}

// Fetches the inputs of the next outputs in the rows that the row of outputs above has not read: too short stretches of
// memory for the core to see that they are in order.
template <size_t kStride, typename T>
inline void fetch_ahead(const DepthwiseConvolution& l, const T* image, size_t i, size_t j) {
  for (size_t r = kSide - kStride; r < kSide; ++r) {
    const size_t row = i * kStride + r - l.padding[0], column = (j + kNeighbors) * kStride + kSide - 1 - l.padding[1];
    if (row >= l.height || column >= l.width) continue;
    const char* from = reinterpret_cast<const char*>(image + (row * l.width + column) * l.channels);
    const size_t bytes = std::min(kNeighbors * kStride, l.width - column) * l.channels * sizeof(T);
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
  }
}

template <size_t kStride, typename T>
void direct_forward(const DepthwiseConvolution& l, const T* x, const float* weights, const float* bias, T* out) {
  constexpr size_t kColumns = (kNeighbors - 1) * kStride + kSide;
  share(l.images * l.out_height, l.images * l.out_height * l.out_width * l.channels, l.threads,
        [&](size_t unit, size_t end) {
          const T* zeros = kept<T, 7>(l.channels);  // never written
          const T* from[kSide * kColumns];
          for (; unit < end; ++unit) {
            const size_t i = unit % l.out_height;
            const T* image = x + unit / l.out_height * l.height * l.width * l.channels;
            for (size_t j = 0; j < l.out_width; j += kNeighbors) {
              for (size_t r = 0; r < kSide; ++r) {
                const size_t row = i * kStride + r - l.padding[0];  // wraps around above the image
                for (size_t column = 0; column < kColumns; ++column) {
                  const size_t at = j * kStride + column - l.padding[1];
                  const bool inside = row < l.height && at < l.width;
                  from[r * kColumns + column] = inside ? image + (row * l.width + at) * l.channels : zeros;
                }
              }
              fetch_ahead<kStride>(l, image, i, j);
              direct_outputs<kStride>(from, weights, bias, l.channels, std::min(kNeighbors, l.out_width - j),
                                      out + (unit * l.out_width + j) * l.channels);
            }
          }
        });
}

template <typename T>
void direct_forward(const DepthwiseConvolution& l, const T* x, const float* weights, const float* bias, T* out) {
  l.stride[0] == 1 ? direct_forward<1>(l, x, weights, bias, out) : direct_forward<2>(l, x, weights, bias, out);
}

// Whether the input gradient is a convolution of the outputs' gradients, padded by at least nothing.
inline bool turns(const DepthwiseConvolution& l) {
  return is_direct(l) && l.stride[0] == 1 && l.padding[0] < kSide && l.padding[1] < kSide;
}

// The input gradient: the outputs' gradients convolved by the turned weights.
template <typename T>
void direct_input_gradient(const DepthwiseConvolution& l, const T* g, const float* weights, T* out) {
  DepthwiseConvolution other = l;
  other.height = l.out_height, other.width = l.out_width, other.out_height = l.height, other.out_width = l.width;
  for (size_t axis = 0; axis < 2; ++axis) other.padding[axis] = kSide - 1 - l.padding[axis];
  float* turned = kept<float, 6>(kSide * kSide * l.channels);
  for (size_t tap = 0; tap < kSide * kSide; ++tap) {
    const float* from = weights + (kSide * kSide - 1 - tap) * l.channels;
    std::copy(from, from + l.channels, turned + tap * l.channels);
  }
  direct_forward<1>(other, g, turned, nullptr, out);
}

}  // namespace
