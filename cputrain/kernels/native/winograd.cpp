// 3 x 3 convolutions of stride 1 by Winograd's algorithm F(4x4, 3x3): outputs, input gradients and weight gradients.
//
// Plain C functions for ctypes. Images are channels-last, float32 or bfloat16; weights are (out, 3, 3, in) float32;
// channels are multiples of 16. Sums are float32, in an order that does not depend on the number of threads.

#include "winograd.hpp"

extern "C" {

// One layer: `height` and `width` of its input, padding on each side (0 to 2), and the number of tiles per block.
struct Convolution {
  size_t images, height, width, in_channels, out_channels, padding;
  int bfloat16, threads;
  size_t tiles;
};

}  // extern "C"

namespace {

// Size of the output, and the tiles that cover it.
struct Tiles {
  size_t height, width, down, across, count;

  explicit Tiles(const Convolution& of)
      : height(of.height + 2 * of.padding - 2),
        width(of.width + 2 * of.padding - 2),
        down((height + kOut - 1) / kOut),
        across((width + kOut - 1) / kOut),
        count(of.images * down * across) {}
};

struct Place {
  size_t image, top, left;  // position of a tile's outputs
};

inline Place place_of(const Tiles& tiles, size_t tile) {
  const size_t in_image = tile % (tiles.down * tiles.across);
  return {tile / (tiles.down * tiles.across), in_image / tiles.across * kOut, in_image % tiles.across * kOut};
}

inline size_t matrix(size_t rows, size_t columns) { return rows * columns + kGap; }

// Returns the number of blocks that are computed at the same time, each in its thread's scratch memory; 1 if there are
// fewer blocks than threads, and all threads share each block.
inline size_t blocks_at_once(const Convolution& layer, const Tiles& tiles) {
  const size_t threads = static_cast<size_t>(std::max(1, layer.threads));
  return (tiles.count + layer.tiles - 1) / layer.tiles >= threads ? threads : 1;
}

// Channels-last feature maps that are split into patches, with their zero padding.
template <typename T>
struct Maps {
  const T* values;
  size_t height, width, channels, padding;
};

// Writes the transformed kSide x kSide patches of tiles first + begin to first + end - 1 to v, 36 matrices of
// tiles x channels.
template <size_t kSide, typename T, typename Transform>
void patches(const Maps<T>& maps, const Tiles& tiles, size_t first, size_t begin, size_t end, const Transform& transform,
             float* v, size_t step) {
  for (size_t t = begin; t < end; ++t) {
    const Place at = place_of(tiles, first + t);
    const T* image = maps.values + at.image * maps.height * maps.width * maps.channels;
    for (size_t c = 0; c < maps.channels; c += kWidth) {
      Vector patch[kSide][kSide], done[kIn][kIn];
      for (size_t i = 0; i < kSide; ++i) {
        const size_t row = at.top + i - maps.padding;  // wraps around above the image
        for (size_t j = 0; j < kSide; ++j) {
          const size_t column = at.left + j - maps.padding;
          const bool inside = row < maps.height && column < maps.width;
          patch[i][j] = inside ? read(image + (row * maps.width + column) * maps.channels + c) : Vector{};
        }
      }
      both_ways(patch, done, transform);
      for (size_t p = 0; p < kPoints; ++p) write(v + p * step + t * maps.channels + c, done[p / kIn][p % kIn]);
    }
  }
}

// Transforms the 6 x 6 patches of the input.
template <typename T>
void inputs(const Convolution& layer, const Tiles& tiles, const T* x, size_t first, size_t begin, size_t end, float* v,
            size_t step) {
  const Maps<T> maps{x, layer.height, layer.width, layer.in_channels, layer.padding};
  patches<kIn>(maps, tiles, first, begin, end, transform_input, v, step);
}

// Transforms the 4 x 4 patches of the outputs' gradient.
template <typename T>
void gradients(const Convolution& layer, const Tiles& tiles, const T* g, size_t first, size_t begin, size_t end,
               float* v, size_t step) {
  const Maps<T> maps{g, tiles.height, tiles.width, layer.out_channels, 0};
  patches<kOut>(maps, tiles, first, begin, end, transform_gradient, v, step);
}

// Computes the outputs of tiles from their 36 matrices m, with optional bias and ReLU.
template <typename T>
void outputs(const Convolution& layer, const Tiles& tiles, const float* m, size_t step, size_t first, size_t begin,
             size_t end, const float* bias, bool relu, T* y) {
  const size_t channels = layer.out_channels;
  for (size_t t = begin; t < end; ++t) {
    const Place at = place_of(tiles, first + t);
    T* image = y + at.image * tiles.height * tiles.width * channels;
    for (size_t c = 0; c < channels; c += kWidth) {
      Vector sums[kIn][kIn], done[kOut][kOut];
      for (size_t p = 0; p < kPoints; ++p) sums[p / kIn][p % kIn] = read(m + p * step + t * channels + c);
      both_ways(sums, done, transform_output);
      const Vector added = bias == nullptr ? Vector{} : read(bias + c);
      for (size_t i = 0; i < kOut && at.top + i < tiles.height; ++i) {
        for (size_t j = 0; j < kOut && at.left + j < tiles.width; ++j) {
          Vector value = bias == nullptr ? done[i][j] : done[i][j] + added;
          if (relu) value = value < 0.0F ? Vector{} : value;  // keeps NaN
          write(image + ((at.top + i) * tiles.width + at.left + j) * channels + c, value);
        }
      }
    }
  }
}

// Computes one of 36 products of transformed tiles and weights: m (tiles x out) = v (tiles x in) u.
void forward_product(const Convolution& layer, const float* v, const float* u, size_t rows, float* m) {
  for (size_t k = 0; k < layer.out_channels; k += kPanel) {
    const size_t width = std::min(kPanel, layer.out_channels - k);
    product(v, layer.in_channels, 1, rows, u + layer.in_channels * k, width, layer.in_channels, m + k,
            layer.out_channels, width / kWidth, false);
  }
}

template <typename T>
void forward(const Convolution& layer, const T* x, const float* u, const float* bias, bool relu, T* y, float* scratch) {
  const Tiles tiles(layer);
  const size_t step_u = matrix(layer.in_channels, layer.out_channels);
  const size_t step_v = matrix(layer.tiles, layer.in_channels), step_m = matrix(layer.tiles, layer.out_channels);
  if (blocks_at_once(layer, tiles) > 1 || layer.threads <= 1) {  // each thread computes its own blocks
    const size_t blocks = (tiles.count + layer.tiles - 1) / layer.tiles;
    share(blocks, tiles.count * layer.in_channels * kPoints, layer.threads, [&](size_t begin, size_t end) {
      float* v = scratch + thread_number() * kPoints * (step_v + step_m);
      float* m = v + kPoints * step_v;
      for (size_t b = begin; b < end; ++b) {
        const size_t first = b * layer.tiles, count = std::min(layer.tiles, tiles.count - first);
        inputs(layer, tiles, x, first, 0, count, v, step_v);
        for (size_t p = 0; p < kPoints; ++p) {
          forward_product(layer, v + p * step_v, u + p * step_u, count, m + p * step_m);
        }
        outputs(layer, tiles, m, step_m, first, 0, count, bias, relu, y);
      }
    });
    return;
  }
  float *v = scratch, *m = scratch + kPoints * step_v;
  for (size_t first = 0; first < tiles.count; first += layer.tiles) {  // all threads share each block
    const size_t count = std::min(layer.tiles, tiles.count - first), values = count * layer.in_channels * kPoints;
    share(count, values, layer.threads,
          [&](size_t begin, size_t end) { inputs(layer, tiles, x, first, begin, end, v, step_v); });
    share(kPoints, values, layer.threads, [&](size_t begin, size_t end) {
      for (size_t p = begin; p < end; ++p) {
        forward_product(layer, v + p * step_v, u + p * step_u, count, m + p * step_m);
      }
    });
    share(count, values, layer.threads, [&](size_t begin, size_t end) {
      outputs(layer, tiles, m, step_m, first, begin, end, bias, relu, y);
    });
  }
}

// Computes the sums over tiles in the transformed domain, s (36 matrices of out x in), then the weight gradient.
template <typename T>
void weight_gradient(const Convolution& layer, const T* x, const T* g, float* out, float* scratch) {
  const Tiles tiles(layer);
  const size_t in = layer.in_channels, outs = layer.out_channels;
  const size_t step_v = matrix(layer.tiles, in), step_w = matrix(layer.tiles, outs), step_s = outs * in + kGap;
  float *v = scratch, *w = v + kPoints * step_v, *s = w + kPoints * step_w;
  const size_t strips = (outs + kPanel - 1) / kPanel;  // strips of rows of s; threads share points x strips
  for (size_t first = 0; first < tiles.count; first += layer.tiles) {
    const size_t count = std::min(layer.tiles, tiles.count - first), values = count * (in + outs) * kPoints;
    share(count, values, layer.threads, [&](size_t begin, size_t end) {
      inputs(layer, tiles, x, first, begin, end, v, step_v);
      gradients(layer, tiles, g, first, begin, end, w, step_w);
    });
    share(kPoints * strips, values, layer.threads, [&](size_t begin, size_t end) {
      for (size_t one = begin; one < end; ++one) {
        const size_t p = one / strips, k = one % strips * kPanel, rows = std::min(kPanel, outs - k);
        for (size_t c = 0; c < in; c += kPanel) {
          product(w + p * step_w + k, 1, outs, rows, v + p * step_v + c, in, count, s + p * step_s + k * in + c, in,
                  std::min(kPanel, in - c) / kWidth, first > 0);
        }
      }
    });
  }
  share(outs, outs * in * kPoints, layer.threads, [&](size_t begin, size_t end) {
    for (size_t k = begin; k < end; ++k) {
      for (size_t c = 0; c < in; c += kWidth) {
        Vector sums[kIn][kIn], done[3][3];
        for (size_t p = 0; p < kPoints; ++p) sums[p / kIn][p % kIn] = read(s + p * step_s + k * in + c);
        both_ways(sums, done, transform_weight_gradient);
        for (size_t i = 0; i < kTaps; ++i) write(out + (k * kTaps + i) * in + c, done[i / 3][i % 3]);
      }
    }
  });
}

// Transforms weights w, (out, 3, 3, in), to u: 36 matrices of depth x width in panels of columns. The depth is the last
// dimension of w. With `mirrored` it is the first, and taps are reversed, for the input gradient.
void weights(const float* w, size_t outs, size_t in, bool mirrored, int threads, float* u) {
  const size_t depth = mirrored ? outs : in, width = mirrored ? in : outs;
  const size_t blocks = depth / kWidth;
  share(width / kWidth * blocks, outs * in * kPoints, threads, [&](size_t begin, size_t end) {
    for (size_t one = begin; one < end; ++one) {
      const size_t k = one / blocks * kWidth, d = one % blocks * kWidth;
      Vector taps[kTaps][kWidth];
      for (size_t i = 0; i < kTaps; ++i) {
        Vector* rows = taps[mirrored ? kTaps - 1 - i : i];
        for (size_t r = 0; r < kWidth; ++r) {
          rows[r] = read(w + (mirrored ? ((d + r) * kTaps + i) * in + k : ((k + r) * kTaps + i) * in + d));
        }
        if (!mirrored) transpose(rows);
      }
      const size_t first = k / kPanel * kPanel, panel_width = std::min(kPanel, width - first);
      for (size_t r = 0; r < kWidth; ++r) {
        Vector g[3][3], done[kIn][kIn];
        for (size_t i = 0; i < kTaps; ++i) g[i / 3][i % 3] = taps[i][r];
        both_ways(g, done, transform_weight);
        float* at = u + depth * first + (d + r) * panel_width + (k - first);
        for (size_t p = 0; p < kPoints; ++p) write(at + p * matrix(depth, width), done[p / kIn][p % kIn]);
      }
    }
  });
}

}  // namespace

extern "C" {

// Returns the bytes of scratch memory for a forward pass, or with `gradient` for a weight gradient.
size_t winograd_scratch(const Convolution* layer, int gradient) {
  const size_t pair = matrix(layer->tiles, layer->in_channels) + matrix(layer->tiles, layer->out_channels);
  const size_t sums = layer->out_channels * layer->in_channels + kGap;
  return sizeof(float) * kPoints * (gradient != 0 ? pair + sums : blocks_at_once(*layer, Tiles(*layer)) * pair);
}

// Returns the number of floats of transformed weights.
size_t winograd_weights_size(size_t outs, size_t in) { return kPoints * matrix(outs, in); }

void winograd_weights(const float* w, size_t outs, size_t in, int mirrored, int threads, float* u) {
  weights(w, outs, in, mirrored != 0, threads, u);
}

// Computes y = ReLU(conv(x) + bias); bias may be null. With mirrored weights it computes the input gradient: x is the
// outputs' gradient, in and out are swapped, and the padding is 2 - padding.
void winograd_forward(const Convolution* layer, const void* x, const float* u, const float* bias, int relu, void* y,
                      float* scratch) {
  if (layer->bfloat16 != 0) {
    forward(*layer, static_cast<const Bfloat16*>(x), u, bias, relu != 0, static_cast<Bfloat16*>(y), scratch);
  } else {
    forward(*layer, static_cast<const float*>(x), u, bias, relu != 0, static_cast<float*>(y), scratch);
  }
}

// Computes the weight gradient (out, 3, 3, in) from inputs x and the outputs' gradient g.
void winograd_weight_gradient(const Convolution* layer, const void* x, const void* g, float* out, float* scratch) {
  if (layer->bfloat16 != 0) {
    weight_gradient(*layer, static_cast<const Bfloat16*>(x), static_cast<const Bfloat16*>(g), out, scratch);
  } else {
    weight_gradient(*layer, static_cast<const float*>(x), static_cast<const float*>(g), out, scratch);
  }
}
}
