// Grouped convolutions of few channels per group, channels-last, float32: outputs and weight gradients. The input
// gradient of stride 1 is a convolution of the outputs' gradients by the turned weights.
//
// Each block of channels of a strip of rows is copied to memory that stays in a core's cache, with zeros around the
// image. A block is a group of 8, 16 or 24 channels, or two groups of 4, one in each half of a vector. Sums are in
// an order that does not depend on the number of threads.

#pragma once

#include "operator_kernels.hpp"
#include "rows.hpp"
#include "vectors.hpp"

namespace {

constexpr size_t kStripFloats = 1 << 13;  // of a block's strip of rows
constexpr size_t kGroupUnits = 32;        // parts of a layer's work that threads share
constexpr size_t kMostPlaces = 8;         // neighboring outputs whose sums are in registers

// The memory of one block: channels of a place, input channels of a group, and blocks of the layer.
struct Block {
  size_t channels, inputs, count;

  explicit Block(const GroupedConvolution& l)
      : channels(std::max(l.channels / l.groups, kWidth)), inputs(l.channels / l.groups),
        count(l.channels / channels) {}
};

// Rows of padded inputs that outputs of some rows read, and places in such a row.
struct Strip {
  size_t rows, in_rows, in_width;

  Strip(const GroupedConvolution& l, const Block& block) {
    in_width = l.width + 2 * l.padding[1];
    rows = std::clamp<size_t>(kStripFloats / (in_width * block.channels * l.stride[0]), 1, l.out_height);
    in_rows = (rows - 1) * l.stride[0] + (l.kernel[0] - 1) * l.dilation[0] + 1;
  }
  size_t count(size_t all) const { return (all + rows - 1) / rows; }
};

// Input channel c of each lane's group: the same value for a group as wide as a vector, one for each half for two.
template <bool kTwo>
inline Vector spread(const float* x, size_t c) {
  if constexpr (kTwo) {
    const Vector pair = read(x);
    constexpr Indices kFirst = {0, 0, 0, 0, 4, 4, 4, 4};
    return __builtin_shuffle(pair, kFirst + static_cast<int32_t>(c));
  } else {
    return x[c] - Vector{};  // folded to a broadcast
  }
}

// Keeps vectors in registers, which GCC would read again for every product.
template <size_t kVectors>
inline void hold([[maybe_unused]] Vector (&vectors)[kVectors]) {
#ifdef __AVX2__
  for (size_t v = 0; v < kVectors; ++v) asm("" : "+x"(vectors[v]));
#endif
}

// Copies the padded rows from `first` on of a block of channels.
inline void pack_strip(const GroupedConvolution& l, const Block& block, const float* image, ptrdiff_t first,
                       const Strip& strip, float* to) {
  const size_t row_floats = strip.in_width * block.channels, edge = l.padding[1] * block.channels;
  for (size_t row = 0; row < strip.in_rows; ++row, to += row_floats) {
    const ptrdiff_t from = first + static_cast<ptrdiff_t>(row) - static_cast<ptrdiff_t>(l.padding[0]);
    if (from < 0 || from >= static_cast<ptrdiff_t>(l.height)) {
      std::fill(to, to + row_floats, 0.0F);
      continue;
    }
    std::fill(to, to + edge, 0.0F);
    const float* at = image + static_cast<size_t>(from) * l.width * l.channels;
    float* place = to + edge;
    for (size_t j = 0; j < l.width; ++j, at += l.channels, place += block.channels) {
      for (size_t c = 0; c < block.channels; c += kWidth) write(place + c, read(at + c));
    }
    std::fill(place, place + edge, 0.0F);
  }
}

// Writes `count` of kPlaces neighboring outputs of kVectors vectors. Not inlined, for the registers' sake, as below.
template <size_t kVectors, size_t kPlaces, bool kTwo>
[[gnu::noinline]] void grouped_outputs(const GroupedConvolution& l, const Block& block, const float* x,
                                       size_t row_floats, const float* weights, const float* bias, size_t count,
                                       float* out) {
  const size_t step = l.stride[1] * block.channels, inputs = kTwo ? 4 : block.inputs;
  const size_t down = l.dilation[0] * row_floats, across = l.dilation[1] * block.channels;
  Vector sums[kPlaces][kVectors];
  for (size_t p = 0; p < kPlaces; ++p) {
    for (size_t v = 0; v < kVectors; ++v) sums[p][v] = bias == nullptr ? Vector{} : read(bias + v * kWidth);
  }
  for (size_t r = 0; r < l.kernel[0]; ++r) {
    for (size_t s = 0; s < l.kernel[1]; ++s) {
      const float* at = x + r * down + s * across;
#pragma GCC unroll 1
      for (size_t c = 0; c < inputs; ++c, weights += kVectors * kWidth) {
        Vector of_input[kVectors];
        for (size_t v = 0; v < kVectors; ++v) of_input[v] = read(weights + v * kWidth);
        hold(of_input);
#pragma GCC unroll 8
        for (size_t p = 0; p < kPlaces; ++p) {
          const Vector value = spread<kTwo>(at + p * step, c);
          for (size_t v = 0; v < kVectors; ++v) sums[p][v] += value * of_input[v];
        }
      }
    }
  }
  for (size_t p = 0; p < count; ++p) {
    for (size_t v = 0; v < kVectors; ++v) write(out + p * l.channels + v * kWidth, sums[p][v]);
  }
}

// Calls work(vectors, places, two) with the compile-time numbers of a block.
template <typename Work>
void by_block(const Block& block, const Work& work) {
  if (block.inputs < kWidth) return work.template operator()<1, 8, true>();
  switch (block.channels / kWidth) {
    case 3: return work.template operator()<3, 4, false>();
    case 2: return work.template operator()<2, 4, false>();
    default: return work.template operator()<1, 8, false>();
  }
}

// `weights` are (block, tap, input channel of the group, channel of the block).
inline void grouped_forward(const GroupedConvolution& l, const float* x, const float* weights, const float* bias,
                            float* out) {
  const Block block(l);
  const Strip strip(l, block);
  const size_t taps = l.kernel[0] * l.kernel[1], strips = strip.count(l.out_height);
  const size_t row_floats = strip.in_width * block.channels;
  share(l.images * block.count * strips, l.images * l.out_height * l.out_width * l.channels, l.threads,
        [&](size_t unit, size_t end) {
          // The last outputs of a row may read what is behind it, and are not written.
          const size_t behind = (kMostPlaces * l.stride[1] + l.kernel[1] * l.dilation[1]) * block.channels;
          float* packed = kept<float, 1>(strip.in_rows * row_floats + behind);
          for (; unit < end; ++unit) {
            const size_t part = unit % strips, number = unit / strips % block.count;
            const size_t image = unit / strips / block.count;
            const size_t from = number * block.channels, first = part * strip.rows;
            pack_strip(l, block, x + image * l.height * l.width * l.channels + from,
                       static_cast<ptrdiff_t>(first * l.stride[0]), strip, packed);
            const float* of_block = weights + number * taps * block.inputs * block.channels;
            by_block(block, [&]<size_t kVectors, size_t kPlaces, bool kTwo>() {
              for (size_t i = first; i < std::min(first + strip.rows, l.out_height); ++i) {
                const float* row = packed + (i - first) * l.stride[0] * row_floats;
                float* to = out + ((image * l.out_height + i) * l.out_width) * l.channels + from;
                for (size_t j = 0; j < l.out_width; j += kPlaces) {
                  grouped_outputs<kVectors, kPlaces, kTwo>(
                      l, block, row + j * l.stride[1] * block.channels, row_floats, of_block,
                      bias == nullptr ? nullptr : bias + from, std::min(kPlaces, l.out_width - j), to + j * l.channels);
                }
              }
            });
          }
        });
}

// Adds to sums, kInputs x kVectors vectors, the products of inputs from channel c on and gradients, over rows of
// places.
template <size_t kVectors, size_t kInputs, bool kTwo>
[[gnu::noinline]] void add_products(const float* x, size_t step, size_t row_step, size_t c, const float* g, size_t rows,
                                    size_t places, float* sums) {
  constexpr size_t kChannels = kVectors * kWidth;
  Vector part[kInputs][kVectors];
  for (size_t i = 0; i < kInputs; ++i) {
    for (size_t v = 0; v < kVectors; ++v) part[i][v] = read(sums + i * kChannels + v * kWidth);
  }
  for (size_t row = 0; row < rows; ++row, x += row_step) {
    const float* at = x;
#pragma GCC unroll 1
    for (size_t j = 0; j < places; ++j, at += step, g += kChannels) {
      Vector gradient[kVectors];
      for (size_t v = 0; v < kVectors; ++v) gradient[v] = read(g + v * kWidth);
      hold(gradient);
#pragma GCC unroll 8
      for (size_t i = 0; i < kInputs; ++i) {
        const Vector value = spread<kTwo>(at, c + i);
        for (size_t v = 0; v < kVectors; ++v) part[i][v] += value * gradient[v];
      }
    }
  }
  for (size_t i = 0; i < kInputs; ++i) {
    for (size_t v = 0; v < kVectors; ++v) write(sums + i * kChannels + v * kWidth, part[i][v]);
  }
}

// Adds an image's products to the sums (tap, input channel of the group, channel of the block).
inline void add_grouped_image(const GroupedConvolution& l, const Block& block, const Strip& strip, const float* x,
                              const float* g, float* packed, float* gradients, float* sums) {
  const size_t row_floats = strip.in_width * block.channels, step = l.stride[1] * block.channels;
  for (size_t first = 0; first < l.out_height; first += strip.rows) {
    const size_t rows = std::min(strip.rows, l.out_height - first);
    pack_strip(l, block, x, static_cast<ptrdiff_t>(first * l.stride[0]), strip, packed);
    const float* from = g + first * l.out_width * l.channels;
    for (size_t place = 0; place < rows * l.out_width; ++place, from += l.channels) {
      for (size_t c = 0; c < block.channels; c += kWidth) write(gradients + place * block.channels + c, read(from + c));
    }
    by_block(block, [&]<size_t kVectors, size_t kPlaces, bool kTwo>() {
      constexpr size_t kInputs = kTwo || kVectors == 3 ? 4 : 8 / kVectors;
      float* to = sums;
      for (size_t tap = 0; tap < l.kernel[0] * l.kernel[1]; ++tap) {
        const float* at = packed + tap / l.kernel[1] * l.dilation[0] * row_floats +
                          tap % l.kernel[1] * l.dilation[1] * block.channels;
        for (size_t c = 0; c < block.inputs; c += kInputs, to += kInputs * block.channels) {
          add_products<kVectors, kInputs, kTwo>(at, step, l.stride[0] * row_floats, c, gradients, rows, l.out_width,
                                                to);
        }
      }
    });
  }
}

// Writes weight gradients as weights are for grouped_forward.
inline void grouped_weight_gradient(const GroupedConvolution& l, const float* x, const float* g, float* out) {
  const Block block(l);
  const Strip strip(l, block);
  const size_t size = l.kernel[0] * l.kernel[1] * block.inputs * block.channels;
  const size_t parts = std::min(l.images, std::max<size_t>(1, kGroupUnits / block.count));
  double* all = kept<double, 0>(parts * block.count * size);
  share(parts * block.count, l.images * l.out_height * l.out_width * l.channels, l.threads,
        [&](size_t unit, size_t end) {
          float* packed = kept<float, 1>(strip.in_rows * strip.in_width * block.channels);
          float* gradients = kept<float, 2>(strip.rows * l.out_width * block.channels);
          float* sums = kept<float, 3>(size);
          for (; unit < end; ++unit) {
            const size_t number = unit % block.count, part = unit / block.count, from = number * block.channels;
            double* total = all + unit * size;
            std::fill(total, total + size, 0.0);
            for (size_t n = l.images * part / parts; n < l.images * (part + 1) / parts; ++n) {
              std::fill(sums, sums + size, 0.0F);
              add_grouped_image(l, block, strip, x + n * l.height * l.width * l.channels + from,
                                g + n * l.out_height * l.out_width * l.channels + from, packed, gradients, sums);
              for (size_t i = 0; i < size; ++i) total[i] += sums[i];
            }
          }
        });
  for (size_t i = 0; i < block.count * size; ++i) {
    double sum = 0;
    for (size_t part = 0; part < parts; ++part) sum += all[part * block.count * size + i];
    out[i] = static_cast<float>(sum);
  }
}

}  // namespace
