// Weight gradients of direct convolutions in bfloat16, with float32 sums, for CPUs with AVX512-BF16 and without AMX.
//
// Plain C functions for ctypes. For each tap, the gradient is the product g^T x of two matrices whose rows are the
// outputs' places: their gradients, and the inputs that the tap reads there. Both are packed in pairs of rows, which
// VDPBF16PS multiplies and adds. Sums are in an order that does not depend on the number of threads.

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "rows.hpp"
#include "vectors.hpp"

extern "C" {

// One layer: sizes of its input, output and kernel, stride and padding (down, then across), and threads. Images are
// channels-last; channels are multiples of 16.
struct DirectConvolution {
  size_t images, height, width, in_channels, out_channels, out_height, out_width;
  size_t kernel[2], stride[2], padding[2];
  int threads;
};

}  // extern "C"

namespace {

constexpr size_t kDepth = 384;    // rows in a block, whose packed panels stay in a core's cache
constexpr size_t kWhole = 1024;   // most rows that are one block
constexpr size_t kPart = 4096;    // rows whose products are summed before the sum is added to those of other parts
constexpr size_t kMostParts = 32;
constexpr size_t kProducts = 256;  // products that take as long as another layer's work on a value
constexpr size_t kStrip = 16;     // output channels that are packed together

// Two bfloat16 values of each column: of one row in the low half, of the next one in the high half.
inline Words paired(const Bfloat16* low, const Bfloat16* high) {
  const Words first = low == nullptr ? Words{} : __builtin_convertvector(*reinterpret_cast<const Halves*>(low), Words);
  const Words second =
      high == nullptr ? Words{} : __builtin_convertvector(*reinterpret_cast<const Halves*>(high), Words) << 16;
  return first | second;
}

inline void write(uint32_t* to, Words pairs) { __builtin_memcpy(to, &pairs, sizeof(pairs)); }

// Adds the products of the pair `g` and the pairs at `x`.
inline Vector add_products(Vector sums, uint32_t g, const uint32_t* x) {
  Words pairs;
  __builtin_memcpy(&pairs, x, sizeof(pairs));
#ifdef __AVX512BF16__
  return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(static_cast<int>(g)), (__m512bh)pairs);
#else
  const float low = std::bit_cast<float>(g << 16), high = std::bit_cast<float>(g & 0xffff0000U);
  return sums + low * (Vector)(pairs << 16) + high * (Vector)(pairs & 0xffff0000U);
#endif
}

// Memory that will be read soon: products fetch `rate` bytes of it into the cache for each pair of rows.
struct Ahead {
  uintptr_t from, end;
  size_t rate;
};

// Computes kHeight rows (output channels) of kColumns vectors: out = or += sum over pairs of g(pair, row) x(pair, :).
template <size_t kHeight, size_t kColumns>
inline void block(const uint32_t* g, const uint32_t* x, size_t pairs, float* out, size_t out_step, bool add,
                  Ahead& ahead) {
  const uintptr_t soon = ahead.from;
  const size_t rate = ahead.rate;
  ahead.from += pairs * rate;
  Vector sums[kHeight][kColumns];
  for (size_t r = 0; r < kHeight; ++r) {
    for (size_t j = 0; j < kColumns; ++j) sums[r][j] = add ? read(out + r * out_step + j * kWidth) : Vector{};
  }
  for (size_t i = 0; i < pairs; ++i) {
    __builtin_prefetch(reinterpret_cast<const void*>(soon + i * rate), 0, 2);
#pragma GCC unroll 6
    for (size_t r = 0; r < kHeight; ++r) {
      for (size_t j = 0; j < kColumns; ++j) {
        sums[r][j] = add_products(sums[r][j], g[i * kStrip + r], x + (i * kColumns + j) * kWidth);
      }
    }
  }
  for (size_t r = 0; r < kHeight; ++r) {
    for (size_t j = 0; j < kColumns; ++j) write(out + r * out_step + j * kWidth, sums[r][j]);
  }
}

// Computes a strip of output channels: 6, 5 and 5 rows, which fill the registers.
template <size_t kColumns>
void strip(const uint32_t* g, const uint32_t* x, size_t pairs, float* out, size_t out_step, bool add, Ahead& ahead) {
  block<6, kColumns>(g, x, pairs, out, out_step, add, ahead);
  block<5, kColumns>(g + 6, x, pairs, out + 6 * out_step, out_step, add, ahead);
  block<5, kColumns>(g + 11, x, pairs, out + 11 * out_step, out_step, add, ahead);
}

void strip(size_t columns, const uint32_t* g, const uint32_t* x, size_t pairs, float* out, size_t out_step, bool add,
           Ahead& ahead) {
  switch (columns) {
    case 4: strip<4>(g, x, pairs, out, out_step, add, ahead); break;
    case 3: strip<3>(g, x, pairs, out, out_step, add, ahead); break;
    case 2: strip<2>(g, x, pairs, out, out_step, add, ahead); break;
    default: strip<1>(g, x, pairs, out, out_step, add, ahead); break;
  }
}

// The rows of `values` at places first to end - 1, `width` values each.
Ahead places(const Bfloat16* values, size_t first, size_t end, size_t width, size_t rate) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(values);
  return {start + first * width * sizeof(Bfloat16), start + end * width * sizeof(Bfloat16), rate};
}

// Packs the inputs that a tap reads at the outputs' places first to first + count - 1, `columns` vectors of channels.
void pack_inputs(const DirectConvolution& layer, const Bfloat16* x, size_t tap, size_t first, size_t count,
                 size_t columns, uint32_t* packed) {
  const size_t down = tap / layer.kernel[1], across = tap % layer.kernel[1];
  size_t column = first % layer.out_width, line = first / layer.out_width, row = line % layer.out_height;
  const Bfloat16* image = x + line / layer.out_height * layer.height * layer.width * layer.in_channels;
  const auto next = [&]() -> const Bfloat16* {
    const size_t i = row * layer.stride[0] + down - layer.padding[0];  // wraps around above the image
    const size_t j = column * layer.stride[1] + across - layer.padding[1];
    const Bfloat16* place = image + (i * layer.width + j) * layer.in_channels;
    const bool inside = i < layer.height && j < layer.width;
    if (++column == layer.out_width) {
      column = 0;
      if (++row == layer.out_height) {
        row = 0;
        image += layer.height * layer.width * layer.in_channels;
      }
    }
    return inside ? place : nullptr;
  };
  for (size_t n = 0; n < count; n += 2) {
    const Bfloat16* low = next();
    const Bfloat16* high = n + 1 < count ? next() : nullptr;
    for (size_t c = 0; c < columns * kWidth; c += kWidth, packed += kWidth) {
      write(packed, paired(low == nullptr ? low : low + c, high == nullptr ? high : high + c));
    }
  }
}

// Adds the products of the places first to first + count - 1, for the strips of output channels begin to end - 1, to
// out, or writes them there if `add` is false. The places up to `end_of_next` come next.
void add_block(const DirectConvolution& layer, const Bfloat16* x, const Bfloat16* g, size_t first, size_t count,
               size_t end_of_next, size_t begin, size_t end, bool add, uint32_t* packed_g, uint32_t* packed_x,
               float* out) {
  const size_t in = layer.in_channels, outs = layer.out_channels, pairs = (count + 1) / 2;
  const size_t taps = layer.kernel[0] * layer.kernel[1], panels = (in + kPanel - 1) / kPanel;
  const size_t strip_step = pairs * kStrip + kGap;
  for (size_t i = 0; i < pairs; ++i) {
    const Bfloat16* low = g + (first + 2 * i) * outs;
    const Bfloat16* high = 2 * i + 1 < count ? low + outs : nullptr;
    for (size_t s = begin; s < end; ++s) {
      uint32_t* to = packed_g + (s - begin) * strip_step + i * kStrip;
      for (size_t c = s * kStrip; c < (s + 1) * kStrip; c += kWidth, to += kWidth) {
        write(to, paired(low + c, high == nullptr ? high : high + c));
      }
    }
  }
  // The next block's gradients and, about where a stride of 1 has them, its inputs.
  const size_t next = first + count, width = outs + (layer.stride[0] == 1 ? in : 0);
  const size_t fetches = 3 * taps * panels * (end - begin) * pairs;
  const size_t rate = ((end_of_next - next) * width * sizeof(Bfloat16) + fetches - 1) / fetches;
  Ahead gradients = places(g, next, end_of_next, outs, rate);
  Ahead inputs = places(x, next, end_of_next, in, layer.stride[0] == 1 ? rate : 0);
  for (size_t tap = 0; tap < taps; ++tap) {
    for (size_t c = 0; c < in; c += kPanel) {
      const size_t columns = std::min(kPanel, in - c) / kWidth;
      pack_inputs(layer, x + c, tap, first, count, columns, packed_x);
      for (size_t s = begin; s < end; ++s) {
        strip(columns, packed_g + (s - begin) * strip_step, packed_x, pairs, out + (s * kStrip * taps + tap) * in + c,
              taps * in, add, gradients.from < gradients.end ? gradients : inputs);
      }
    }
  }
}

}  // namespace

extern "C" {

// Returns 1 if the products are instructions of this CPU.
int weight_gradient_native() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

// Computes the weight gradient (out, kernel height, kernel width, in), float32, from inputs x and the outputs'
// gradient g. Threads share parts of the rows, and strips of output channels within a part.
void weight_gradient(const DirectConvolution* of, const Bfloat16* x, const Bfloat16* g, float* out) {
  const DirectConvolution& layer = *of;
  const size_t rows = layer.images * layer.out_height * layer.out_width, strips = layer.out_channels / kStrip;
  const size_t parts = std::min(kMostParts, (rows + kPart - 1) / kPart), size = (rows + parts - 1) / parts;
  const size_t weights = layer.out_channels * layer.kernel[0] * layer.kernel[1] * layer.in_channels;
  float* const sums = kept<float, 0>((parts - 1) * weights);  // of all parts but the first
  share(parts * strips, rows * weights / kProducts, layer.threads, [&](size_t first_unit, size_t end_unit) {
    for (size_t unit = first_unit; unit < end_unit;) {
      const size_t part = unit / strips, begin = unit % strips, end = std::min(strips, begin + end_unit - unit);
      unit += end - begin;
      const size_t first = part * size, stop = std::min(rows, first + size), all = stop - first;
      const size_t blocks = all <= kWhole ? 1 : (all + kDepth - 1) / kDepth;
      const size_t depth = ((all + blocks - 1) / blocks + 1) / 2 * 2;
      const size_t panels_of_g = (end - begin) * (depth / 2 * kStrip + kGap);
      uint32_t* packed = kept<uint32_t, 1>(panels_of_g + depth / 2 * kPanel);
      float* to = part == 0 ? out : sums + (part - 1) * weights;
      for (size_t row = first; row < stop; row += depth) {
        add_block(layer, x, g, row, std::min(depth, stop - row), std::min(rows, row + 2 * depth), begin, end,
                  row > first, packed, packed + panels_of_g, to);
      }
    }
  });
  share(parts > 1 ? weights : 0, weights, layer.threads, [&](size_t begin, size_t end) {
    for (size_t i = 0; i + 1 < parts; ++i) {
      for (size_t k = begin; k < end; ++k) out[k] += sums[i * weights + k];
    }
  });
}
}
