// Depthwise convolutions, channels-last, float32 or bfloat16 with float32 sums: outputs, and gradients of inputs and
// weights.
//
// Rows of images are copied as float32, a block of channels at a time, to memory that
// stays in a core's first cache; taps outside an image are left out, so that nothing is multiplied by padding. Sums are
// in an order that does not depend on the number of threads.

#pragma once

#include "depthwise_direct.hpp"
#include "rows.hpp"
#include "vectors.hpp"

namespace {

constexpr size_t kLanes = 2 * kWidth;  // channels in a block
constexpr size_t kTile = 6;            // neighboring outputs whose sums are in registers
constexpr size_t kMaxTaps = 7;         // taps of a kernel's row whose sums are in registers
constexpr size_t kMinUnits = 32;       // parts of a layer's work that threads share
constexpr size_t kProducts = 16;       // products that take as long as another layer's work on a value
constexpr ptrdiff_t kStep = kLanes;    // floats from a place to the next

using Layer = DepthwiseConvolution;

// One axis of a convolution: out = sum over taps of in[out * stride + tap * dilation - padding] * weight[tap].
struct Axis {
  ptrdiff_t in, out, taps, stride, padding, dilation;

  Axis(const Layer& l, int across)
      : in(across ? l.width : l.height), out(across ? l.out_width : l.out_height), taps(l.kernel[across]),
        stride(l.stride[across]), padding(l.padding[across]), dilation(l.dilation[across]) {}

  ptrdiff_t read(ptrdiff_t place, ptrdiff_t tap) const { return place * stride + tap * dilation - padding; }
  // The outputs first to end - 1 read the image by this tap.
  ptrdiff_t first(ptrdiff_t tap) const {
    const ptrdiff_t before = padding - tap * dilation;
    return before <= 0 ? 0 : std::min(out, (before + stride - 1) / stride);
  }
  ptrdiff_t end(ptrdiff_t tap) const {
    const ptrdiff_t last = in - 1 + padding - tap * dilation;
    return last < 0 ? 0 : std::min(out, last / stride + 1);
  }
};

// Copies `count` places of `channels` channels each, of which `width` are in the block, to blocks of kLanes floats.
// Returns whether all values are finite.
template <typename Value>
bool pack(const Value* from, size_t count, size_t channels, size_t width, float* to) {
  Vector zeros{};  // NaN where a value is not finite
  for (size_t i = 0; i < count; ++i, from += channels, to += kLanes) {
    if (width == kLanes) {
      const Vector low = read(from), high = read(from + kWidth);
      write(to, low);
      write(to + kWidth, high);
      zeros += low * 0.0F + high * 0.0F;
    } else {
      for (size_t c = 0; c < kLanes; ++c) to[c] = c < width ? load(from[c]) : 0.0F;
      zeros += read(to) * 0.0F + read(to + kWidth) * 0.0F;
    }
  }
  for (size_t c = 0; c < kWidth; ++c) {
    if (zeros[c] != 0.0F) return false;
  }
  return true;
}

template <typename Value>
void unpack(const Vector (&sums)[2], size_t width, Value* to) {
  if (width == kLanes) {
    write(to, sums[0]);
    write(to + kWidth, sums[1]);
  } else {
    for (size_t c = 0; c < width; ++c) store(to[c], sums[c / kWidth][c % kWidth]);
  }
}

// The packed rows of an image that were read last, found by their number. Each has zeros `before` and `after` it, which
// taps outside the image may read if their weights are finite.
template <typename Value>
class Rows {
 public:
  Rows(size_t count, size_t places, ptrdiff_t before, ptrdiff_t after)
      : count_(count), places_(places), before_(static_cast<size_t>(std::max<ptrdiff_t>(0, before)) * kLanes),
        step_(before_ + (places + static_cast<size_t>(std::max<ptrdiff_t>(0, after))) * kLanes),
        memory_(kept<float, 1>(count * step_)), held_(kept<ptrdiff_t, 2>(count)) {
    std::fill(memory_, memory_ + count * step_, 0.0F);
  }

  // Reads another image, from the block's first channel on.
  void open(const Value* image, size_t channels, size_t width) {
    image_ = image, channels_ = channels, width_ = width;
    std::fill(held_, held_ + count_, ptrdiff_t{-1});
  }

  const float* operator[](ptrdiff_t row) {
    const size_t slot = static_cast<size_t>(row) % count_;
    float* to = memory_ + slot * step_ + before_;
    if (held_[slot] != row) {
      pack(image_ + static_cast<size_t>(row) * places_ * channels_, places_, channels_, width_, to);
      held_[slot] = row;
    }
    return to;
  }

 private:
  size_t count_, places_, before_, step_;
  float* memory_;
  ptrdiff_t* held_;
  const Value* image_ = nullptr;
  size_t channels_ = 0, width_ = 0;
};

// A tap of an output: where its input and its weights are.
struct Tap {
  const float* input;
  const float* weights;
};

// Writes kCount outputs, `out_step` values apart, whose taps read inputs `step` floats apart, `shift` floats after the
// taps' own.
template <size_t kCount, typename Value>
[[gnu::noinline]] void outputs(const Tap* taps, size_t count, size_t shift, size_t step, const float* bias,
                               size_t width, Value* out, size_t out_step) {
  Vector sums[kCount][2];
  for (size_t t = 0; t < kCount; ++t) {
    for (size_t v = 0; v < 2; ++v) sums[t][v] = bias == nullptr ? Vector{} : read(bias + v * kWidth);
  }
  for (size_t i = 0; i < count; ++i) {
    const Vector low = read(taps[i].weights), high = read(taps[i].weights + kWidth);
    const float* input = taps[i].input + shift;
#pragma GCC unroll 8
    for (size_t t = 0; t < kCount; ++t) {
      sums[t][0] += read(input + t * step) * low;
      sums[t][1] += read(input + t * step + kWidth) * high;
    }
  }
  for (size_t t = 0; t < kCount; ++t) unpack(sums[t], width, out + t * out_step);
}

template <typename Value>
void outputs(size_t tile, const Tap* taps, size_t count, size_t shift, size_t step, const float* bias, size_t width,
             Value* out, size_t out_step) {
  switch (tile) {
    case 6: return outputs<6>(taps, count, shift, step, bias, width, out, out_step);
    case 5: return outputs<5>(taps, count, shift, step, bias, width, out, out_step);
    case 4: return outputs<4>(taps, count, shift, step, bias, width, out, out_step);
    case 3: return outputs<3>(taps, count, shift, step, bias, width, out, out_step);
    case 2: return outputs<2>(taps, count, shift, step, bias, width, out, out_step);
    default: return outputs<1>(taps, count, shift, step, bias, width, out, out_step);
  }
}

// Calls work(image, first channel, channels, first row, end row) for all parts of `rows` rows of each image.
template <typename Work>
void share_rows(const Layer& layer, size_t rows, const Work& work) {
  const size_t blocks = (layer.channels + kLanes - 1) / kLanes, taps = layer.kernel[0] * layer.kernel[1];
  const size_t strips = std::min(rows, std::max<size_t>(1, kMinUnits / std::max<size_t>(1, layer.images * blocks)));
  const size_t values = layer.images * layer.out_height * layer.out_width * layer.channels * taps / kProducts;
  share(layer.images * strips * blocks, values, layer.threads, [&](size_t unit, size_t end) {
    for (; unit < end; ++unit) {
      const size_t block = unit % blocks, strip = unit / blocks % strips, first = block * kLanes;
      work(unit / blocks / strips, first, std::min(kLanes, layer.channels - first), rows * strip / strips,
           rows * (strip + 1) / strips);
    }
  });
}

template <typename Value>
void forward(const Layer& layer, const Value* x, const float* weights, const float* bias, Value* out) {
  const Axis down(layer, 0), across(layer, 1);
  const size_t channels = layer.channels, taps = layer.kernel[0] * layer.kernel[1];
  if (is_direct(layer) && all_finite(weights, taps * channels)) return direct_forward(layer, x, weights, bias, out);
  const size_t slots = static_cast<size_t>((down.taps - 1) * down.dilation + 1);
  const ptrdiff_t after = across.read(across.out - 1, across.taps - 1) - (across.in - 1);
  share_rows(layer, layer.out_height, [&](size_t image, size_t first, size_t width, size_t begin, size_t end) {
    float* packed = kept<float, 3>((taps + 1) * kLanes);
    const bool finite = pack(weights + first, taps, channels, width, packed);
    float* added = bias == nullptr ? nullptr : packed + taps * kLanes;
    if (bias != nullptr) pack(bias + first, 1, channels, width, added);
    Rows<Value> rows(slots, layer.width, across.padding, after);
    rows.open(x + image * layer.height * layer.width * channels + first, channels, width);
    Tap* read_by = kept<Tap, 4>(taps);
    const size_t most = finite ? kTile : 1;
    for (size_t i = begin; i < end; ++i) {
      Value* to = out + (image * layer.out_height + i) * layer.out_width * channels + first;
      size_t count = 0;
      for (size_t j = 0, tile = 0; j < layer.out_width; j += tile) {
        tile = std::min(most, layer.out_width - j);
        if (!finite || j == 0) {  // other outputs of the row read as far behind the first one's inputs
          count = 0;
          for (ptrdiff_t r = 0; r < down.taps; ++r) {
            const ptrdiff_t row = down.read(i, r);
            if (row < 0 || row >= down.in) continue;
            const float* at = rows[row];
            for (ptrdiff_t s = 0; s < across.taps; ++s) {
              const ptrdiff_t column = across.read(j, s);
              if (!finite && (column < 0 || column >= across.in)) continue;
              read_by[count++] = {at + column * kStep, packed + (r * across.taps + s) * kLanes};
            }
          }
        }
        outputs(tile, read_by, count, finite ? j * layer.stride[1] * kLanes : 0, layer.stride[1] * kLanes, added, width,
                to + j * channels, channels);
      }
    }
  });
}

inline ptrdiff_t floor_divide(ptrdiff_t value, ptrdiff_t by) {
  return value >= 0 ? value / by : -1 - (-value - 1) / by;
}

template <typename Value>
void input_gradient(const Layer& layer, const Value* g, const float* weights, Value* out) {
  const Axis down(layer, 0), across(layer, 1);
  const size_t channels = layer.channels, taps = layer.kernel[0] * layer.kernel[1];
  if (turns(layer) && all_finite(weights, taps * channels)) return direct_input_gradient(layer, g, weights, out);
  const size_t slots = static_cast<size_t>((down.taps - 1) * down.dilation / down.stride + 1);
  const ptrdiff_t before = -floor_divide(across.padding - (across.taps - 1) * across.dilation, across.stride);
  const ptrdiff_t after = (across.in - 1 + across.padding) / across.stride - (across.out - 1);
  share_rows(layer, layer.height, [&](size_t image, size_t first, size_t width, size_t begin, size_t end) {
    float* packed = kept<float, 3>(taps * kLanes);
    const bool finite = pack(weights + first, taps, channels, width, packed);
    Rows<Value> rows(slots, layer.out_width, before, after);
    rows.open(g + image * layer.out_height * layer.out_width * channels + first, channels, width);
    Tap* read_by = kept<Tap, 4>(taps);
    const ptrdiff_t most = finite ? kTile : 1;
    for (size_t i = begin; i < end; ++i) {
      Value* to = out + (image * layer.height + i) * layer.width * channels + first;
      // Columns phase, phase + stride, ... read neighboring outputs by the same taps.
      for (ptrdiff_t phase = 0; phase < std::min(across.stride, across.in); ++phase) {
        const ptrdiff_t columns = (across.in - phase + across.stride - 1) / across.stride;
        size_t count = 0;
        for (ptrdiff_t n = 0, tile = 0; n < columns; n += tile) {
          tile = std::min(most, columns - n);
          const ptrdiff_t j = phase + n * across.stride;
          if (!finite || n == 0) {
            count = 0;
            for (ptrdiff_t r = 0; r < down.taps; ++r) {
              const ptrdiff_t row = static_cast<ptrdiff_t>(i) + down.padding - r * down.dilation;
              if (row < 0 || row % down.stride != 0 || row / down.stride >= down.out) continue;
              const float* at = rows[row / down.stride];
              for (ptrdiff_t s = 0; s < across.taps; ++s) {
                const ptrdiff_t column = j + across.padding - s * across.dilation;
                const ptrdiff_t place = floor_divide(column, across.stride);
                if (place * across.stride != column) continue;
                if (!finite && (place < 0 || place >= across.out)) continue;
                read_by[count++] = {at + place * kStep, packed + (r * across.taps + s) * kLanes};
              }
            }
          }
          outputs(tile, read_by, count, finite ? n * kLanes : 0, kLanes, nullptr, width, to + j * channels,
                  across.stride * channels);
        }
      }
    }
  });
}

// Adds to sums[tap] the products of a row of inputs and a row of outputs' gradients, for kTaps taps whose inputs begin
// `tap_step` floats apart, over `count` outputs, whose inputs are `step` floats apart.
template <size_t kTaps>
void add_products(const float* x, size_t tap_step, size_t step, const float* g, size_t count, float* sums) {
  Vector part[kTaps][2];
  for (size_t s = 0; s < kTaps; ++s) {
    for (size_t v = 0; v < 2; ++v) part[s][v] = read(sums + s * kLanes + v * kWidth);
  }
  for (size_t j = 0; j < count; ++j, x += step, g += kLanes) {
    const Vector low = read(g), high = read(g + kWidth);
#pragma GCC unroll 8
    for (size_t s = 0; s < kTaps; ++s) {
      part[s][0] += read(x + s * tap_step) * low;
      part[s][1] += read(x + s * tap_step + kWidth) * high;
    }
  }
  for (size_t s = 0; s < kTaps; ++s) {
    for (size_t v = 0; v < 2; ++v) write(sums + s * kLanes + v * kWidth, part[s][v]);
  }
}

void add_products(size_t taps, const float* x, size_t tap_step, size_t step, const float* g, size_t count,
                  float* sums) {
  switch (taps) {
    case 7: return add_products<7>(x, tap_step, step, g, count, sums);
    case 6: return add_products<6>(x, tap_step, step, g, count, sums);
    case 5: return add_products<5>(x, tap_step, step, g, count, sums);
    case 4: return add_products<4>(x, tap_step, step, g, count, sums);
    case 3: return add_products<3>(x, tap_step, step, g, count, sums);
    case 2: return add_products<2>(x, tap_step, step, g, count, sums);
    default: return add_products<1>(x, tap_step, step, g, count, sums);
  }
}

// Adds one image's products to the sums (taps, kLanes).
template <typename Value>
void add_image(const Layer& layer, Rows<Value>& rows, const Value* g, size_t width, float* gradients, float* sums) {
  const Axis down(layer, 0), across(layer, 1);
  for (ptrdiff_t i = 0; i < down.out; ++i, g += layer.out_width * layer.channels) {
    const bool finite = pack(g, layer.out_width, layer.channels, width, gradients);
    for (ptrdiff_t r = 0; r < down.taps; ++r) {
      const ptrdiff_t row = down.read(i, r);
      if (row < 0 || row >= down.in) continue;
      const float* at = rows[row];
      float* to = sums + r * across.taps * kStep;
      const ptrdiff_t most = finite ? kMaxTaps : 1;
      for (ptrdiff_t s = 0, group = 0; s < across.taps; s += group) {
        group = std::min(most, across.taps - s);
        const ptrdiff_t from = finite ? 0 : across.first(s), end = finite ? across.out : across.end(s);
        if (from >= end) continue;
        add_products(group, at + across.read(from, s) * kStep, across.dilation * kLanes, across.stride * kLanes,
                     gradients + from * kStep, end - from, to + s * kStep);
      }
    }
  }
}

template <typename Value>
void weight_gradient(const Layer& layer, const Value* x, const Value* g, float* out) {
  const Axis down(layer, 0), across(layer, 1);
  const size_t channels = layer.channels, taps = layer.kernel[0] * layer.kernel[1];
  const size_t blocks = (channels + kLanes - 1) / kLanes;
  const size_t parts = std::min(layer.images, std::max<size_t>(1, kMinUnits / blocks));
  const size_t slots = static_cast<size_t>((down.taps - 1) * down.dilation + 1);
  const ptrdiff_t after = across.read(across.out - 1, across.taps - 1) - (across.in - 1);
  double* all = kept<double, 0>(parts * blocks * taps * kLanes);
  const size_t values = layer.images * layer.out_height * layer.out_width * channels * taps / kProducts;
  share(parts * blocks, values, layer.threads, [&](size_t unit, size_t end) {
    for (; unit < end; ++unit) {
      const size_t block = unit % blocks, part = unit / blocks, first = block * kLanes;
      const size_t width = std::min(kLanes, channels - first);
      double* total = all + unit * taps * kLanes;
      std::fill(total, total + taps * kLanes, 0.0);
      Rows<Value> rows(slots, layer.width, across.padding, after);
      float* gradients = kept<float, 5>((layer.out_width + taps) * kLanes);
      float* sums = gradients + layer.out_width * kLanes;
      for (size_t n = layer.images * part / parts; n < layer.images * (part + 1) / parts; ++n) {
        rows.open(x + n * layer.height * layer.width * channels + first, channels, width);
        std::fill(sums, sums + taps * kLanes, 0.0F);
        add_image(layer, rows, g + n * layer.out_height * layer.out_width * channels + first, width, gradients, sums);
        for (size_t k = 0; k < taps * kLanes; ++k) total[k] += sums[k];
      }
    }
  });
  for (size_t tap = 0; tap < taps; ++tap) {
    for (size_t c = 0; c < channels; ++c) {
      double sum = 0.0;
      for (size_t part = 0; part < parts; ++part) {
        sum += all[((part * blocks + c / kLanes) * taps + tap) * kLanes + c % kLanes];
      }
      out[tap * channels + c] = static_cast<float>(sum);
    }
  }
}

}  // namespace
