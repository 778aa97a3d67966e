// JPEGs -> squares of RGB bytes: only the rows and columns that are needed are decoded (libjpeg-turbo), then
// scaled as Pillow scales (antialiased bilinear, in the same fixed-point arithmetic: the same bytes), mirrored or not.
//
// Plain C functions for ctypes. libjpeg-turbo's TurboJPEG 3 functions come as a table of pointers: neither its headers
// nor the library are needed to compile this.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "cut.hpp"

#if defined(__x86_64__) && !defined(CPUTRAIN_PLAIN)
#define CPUTRAIN_AVX2
#include <immintrin.h>
#endif

extern "C" {

struct Region {
  int x, y, width, height;
};

// Functions of TurboJPEG 3, in the order of the table.
struct Turbo {
  void* (*init)(int);
  void (*destroy)(void*);
  int (*get)(void*, int);
  int (*header)(void*, const uint8_t*, size_t);
  int (*crop)(void*, Region);
  int (*decompress)(void*, const uint8_t*, size_t, uint8_t*, int, int);
};

// What is wanted of an image: its part `box`, scaled to (width, height), of that the square of `side` pixels at (x, y).
struct View {
  Region box;
  int width, height;
  int x, y, side;
  int flip;
};
}

namespace {

// TurboJPEG 3's numbers.
constexpr int kInitDecompress = 1, kPixelFormatRgb = 0;
constexpr int kSubsampling = 4, kWidth = 5, kHeight = 6, kPrecision = 7, kColorspace = 8;
constexpr int kRgb = 0, kYCbCr = 1, kGray = 2;
constexpr int kMcuWidth[] = {8, 16, 16, 8, 8, 32, 8};  // of 4:4:4, 4:2:2, 4:2:0, gray, 4:4:0, 4:1:1, 4:4:1

constexpr int kSlack = 16;  // bytes that may be read or written past a buffer's last row
constexpr int kMargin = 2;  // columns beside the part: their chroma takes part in its edge

// Pillow's fixed point: weights of 22 bits leave 8 for the pixel and 2 for the sum.
constexpr int kWeightBits = 32 - 8 - 2;
constexpr int kHalf = 1 << (kWeightBits - 1);

// Which inputs each output is made of: `taps` weights are kept for each (an even number; 0 where they are not used),
// `count` of them used, from input `first` on.
struct Weights {
  int taps;
  std::vector<int> first, count, values;

  int begin() const { return first.front(); }
  int end() const { return first.back() + count.back(); }
  const int* of(size_t output) const { return &values[output * taps]; }
};

// Outputs [from, from + outputs) of `in` inputs scaled to `out`: triangles as wide as one output or one input,
// whichever is wider.
Weights weights_of(int in, int out, int from, int outputs) {
  const double scale = static_cast<double>(in) / out;
  const double reach = std::max(scale, 1.0);
  Weights made{2 * static_cast<int>(std::ceil(reach)) + 2, {}, {}, {}};
  made.values.resize(static_cast<size_t>(outputs) * made.taps);
  std::vector<double> shares(made.taps);
  for (int i = 0; i < outputs; i++) {
    const double center = (from + i + 0.5) * scale;
    const int first = std::max(0, static_cast<int>(center - reach + 0.5));
    const int count = std::min(in, static_cast<int>(center + reach + 0.5)) - first;
    double sum = 0;
    for (int k = 0; k < count; k++) {
      shares[k] = std::max(0.0, 1.0 - std::abs((k + first - center + 0.5) * (1.0 / reach)));
      sum += shares[k];
    }
    for (int k = 0; k < count; k++) {
      made.values[static_cast<size_t>(i) * made.taps + k] =
          static_cast<int>(0.5 + shares[k] / sum * (1 << kWeightBits));
    }
    made.first.push_back(first);
    made.count.push_back(count);
  }
  return made;
}

// Rows of bytes, `stride` apart; `begin` is the number that the weights have for the first of them.
struct Rows {
  const uint8_t* first;
  size_t stride;
  int begin;
};

// No sum exceeds a byte, as the weights are positive and add up to 1.
inline uint8_t rounded(int sum) {
  return static_cast<uint8_t>(sum >> kWeightBits);
}

// Byte x of a row of outputs.
inline uint8_t down(const uint8_t* rows, size_t stride, const int* weight, int count, int x) {
  int sum = kHalf;
  for (int k = 0; k < count; k++) {
    sum += rows[k * stride + x] * weight[k];
  }
  return rounded(sum);
}

// `bytes` of each row -> as many rows as there are weights.
void scale_down(const Rows& in, int bytes, const Weights& weights, uint8_t* to) {
  for (size_t y = 0; y < weights.first.size(); y++, to += bytes) {
    const uint8_t* rows = in.first + in.stride * (weights.first[y] - in.begin);
    for (int x = 0; x < bytes; x++) {
      to[x] = down(rows, in.stride, weights.of(y), weights.count[y], x);
    }
  }
}

// RGB pixels of `count` rows -> as many pixels a row as there are weights, in their order or the reverse.
void scale_across(const Rows& in, int count, const Weights& weights, bool flip, uint8_t* to) {
  const size_t outputs = weights.first.size();
  for (int y = 0; y < count; y++) {
    for (size_t x = 0; x < outputs; x++) {
      const size_t output = flip ? outputs - 1 - x : x;
      const uint8_t* pixel = in.first + y * in.stride + 3 * (weights.first[output] - in.begin);
      for (int colour = 0; colour < 3; colour++) {
        *to++ = down(pixel + colour, 3, weights.of(output), weights.count[output], 0);
      }
    }
  }
}

#if defined(CPUTRAIN_AVX2)
__attribute__((target("avx2"))) void scale_down_avx2(const Rows& in, int bytes, const Weights& weights, uint8_t* to) {
  const __m256i half = _mm256_set1_epi32(kHalf);
  for (size_t y = 0; y < weights.first.size(); y++, to += bytes) {
    const int* weight = weights.of(y);
    const int count = weights.count[y];
    const uint8_t* rows = in.first + in.stride * (weights.first[y] - in.begin);
    int x = 0;
    for (; x + 16 <= bytes; x += 16) {
      __m256i low = half, high = half;
      for (int k = 0; k < count; k++) {
        const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + k * in.stride + x));
        const __m256i by = _mm256_set1_epi32(weight[k]);
        low = _mm256_add_epi32(low, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(row), by));
        high = _mm256_add_epi32(high, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(row, 8)), by));
      }
      // Packing works on the two halves of a register by themselves: their words come out interleaved.
      const __m256i words =
          _mm256_packus_epi32(_mm256_srai_epi32(low, kWeightBits), _mm256_srai_epi32(high, kWeightBits));
      const __m256i ordered = _mm256_permute4x64_epi64(words, 0b11011000);
      const __m128i made = _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + x), made);
    }
    for (; x < bytes; x++) {
      to[x] = down(rows, in.stride, weight, count, x);
    }
  }
}

constexpr int kTile = 32;  // rows that stay in the cache while all outputs of them are made
constexpr int kLower = 11;

// Two outputs of some rows: where their inputs begin in the first row, and their weights, two inputs at a time, for three
// colours and nothing of either. A weight is taken apart into its upper and lower bits, 16-bit numbers whose sums are put
// together at the end: no bit is lost.
struct Pair {
  const uint8_t* from[2];
  const __m256i* upper;
  const __m256i* lower;
  size_t steps;
  bool last;      // of a row: nothing may be written behind it
  bool complete;  // or its second output is none
};

// `kSteps` is the pair's where it is known here, else 0.
template <size_t kSteps>
__attribute__((target("avx2"))) void scale_pair_avx2(
    const Pair& pair, int rows, size_t in_stride, uint8_t* to, size_t out_stride) {
  const __m256i spread = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
  const __m256i gather = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m256i half = _mm256_set1_epi32(kHalf);
  const size_t steps = kSteps > 0 ? kSteps : pair.steps;
  const uint8_t *one = pair.from[0], *other = pair.from[1];
  for (int y = 0; y < rows; y++, one += in_stride, other += in_stride, to += out_stride) {
    __m256i above = _mm256_setzero_si256(), below = half;
    for (size_t k = 0; k < steps; k++) {
      const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(one + 6 * k));
      const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(other + 6 * k));
      const __m256i words = _mm256_shuffle_epi8(_mm256_set_m128i(high, low), spread);
      above = _mm256_add_epi32(above, _mm256_madd_epi16(words, _mm256_loadu_si256(pair.upper + k)));
      below = _mm256_add_epi32(below, _mm256_madd_epi16(words, _mm256_loadu_si256(pair.lower + k)));
    }
    const __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(above, kLower), below);
    const __m256i made = _mm256_shuffle_epi8(_mm256_srai_epi32(sum, kWeightBits), gather);
    const int first = _mm_cvtsi128_si32(_mm256_castsi256_si128(made));
    const int second = _mm_cvtsi128_si32(_mm256_extracti128_si256(made, 1));
    if (!pair.last) {
      std::memcpy(to, &first, 4);
      std::memcpy(to + 3, &second, 4);
    } else {
      std::memcpy(to, &first, 3);
      if (pair.complete) {
        std::memcpy(to + 3, &second, 3);
      }
    }
  }
}

// Reads up to kSlack bytes past the last row's end.
__attribute__((target("avx2"))) void scale_across_avx2(
    const Rows& in, int count, const Weights& weights, bool flip, uint8_t* to) {
  const size_t outputs = weights.first.size(), most = weights.taps / 2, pairs = (outputs + 1) / 2;
  std::vector<int16_t> upper(pairs * most * 16), lower(pairs * most * 16);
  std::vector<Pair> all(pairs);
  for (size_t x = 0; x < 2 * pairs; x++) {
    const size_t wanted = std::min(x, outputs - 1), output = flip ? outputs - 1 - wanted : wanted;
    Pair& pair = all[x / 2];
    for (size_t k = 0; k < most; k++) {
      const size_t at = ((x / 2) * most + k) * 16 + 8 * (x % 2);
      for (size_t i = 0; i < 6; i++) {
        const int weight = weights.of(output)[2 * k + i % 2];
        upper[at + i] = static_cast<int16_t>(weight >> kLower);
        lower[at + i] = static_cast<int16_t>(weight & ((1 << kLower) - 1));
      }
    }
    pair.from[x % 2] = in.first + 3 * static_cast<size_t>(weights.first[output] - in.begin);
    pair.upper = reinterpret_cast<const __m256i*>(&upper[x / 2 * most * 16]);
    pair.lower = reinterpret_cast<const __m256i*>(&lower[x / 2 * most * 16]);
    pair.steps = std::max(x % 2 ? pair.steps : 0, static_cast<size_t>(weights.count[output] + 1) / 2);
    pair.last = x / 2 + 1 == pairs;
    pair.complete = x < outputs;
  }
  for (int y = 0; y < count; y += kTile, to += 3 * outputs * kTile) {
    const int rows = std::min(kTile, count - y);
    for (size_t p = 0; p < pairs; p++) {
      Pair& pair = all[p];
      const auto scale = pair.steps == 1   ? scale_pair_avx2<1>
                         : pair.steps == 2 ? scale_pair_avx2<2>
                                           : scale_pair_avx2<0>;
      scale(pair, rows, in.stride, to + 6 * p, 3 * outputs);
      pair.from[0] += kTile * in.stride;
      pair.from[1] += kTile * in.stride;
    }
  }
}

const bool kAvx2 = __builtin_cpu_supports("avx2");
#else
const bool kAvx2 = false;
constexpr auto scale_down_avx2 = scale_down;
constexpr auto scale_across_avx2 = scale_across;
#endif

}  // namespace

extern "C" {

// A thread's decoder and its buffers, which only grow.
struct Decoder {
  Turbo turbo;
  void* handle;
  std::vector<uint8_t> rows, part, between, made;
};

// TurboJPEG's handle goes on with a header that it has failed in, and then fails in every other one: a new one.
static void renew(Decoder* decoder) {
  decoder->turbo.destroy(decoder->handle);
  decoder->handle = decoder->turbo.init(kInitDecompress);
}

static void make_room(std::vector<uint8_t>& buffer, size_t bytes) {
  if (buffer.size() < bytes) {
    buffer.resize(bytes);
  }
}

Decoder* pixels_open(const Turbo* turbo) {
  return new Decoder{*turbo, turbo->init(kInitDecompress), {}, {}, {}, {}};
}

void pixels_close(Decoder* decoder) {
  decoder->turbo.destroy(decoder->handle);
  delete decoder;
}

// Width and height of each JPEG that ends with an end marker; 0 for all else, which is another decoder's affair.
void pixels_sizes(int count, const uint8_t* const* data, const size_t* bytes, int* sizes) {
  for (int i = 0; i < count; i++, sizes += 2) {
    const uint8_t* of = data[i];
    const size_t end = bytes[i];
    const bool whole = end >= 4 && of[0] == 0xff && of[1] == 0xd8 && of[end - 2] == 0xff && of[end - 1] == 0xd9;
    const auto frame = whole ? cut::frame_of(of, end) : cut::Frame{};
    sizes[0] = frame.width;
    sizes[1] = frame.height;
  }
}

// 8 bits, gray or three colours.
static bool takes(const Turbo& turbo, void* handle) {
  const int colours = turbo.get(handle, kColorspace), subsampling = turbo.get(handle, kSubsampling);
  return turbo.get(handle, kPrecision) == 8 && subsampling >= 0 &&
         subsampling < static_cast<int>(std::size(kMcuWidth)) &&
         (colours == kRgb || colours == kYCbCr || colours == kGray);
}

// A view of one JPEG -> (side, side, 3) bytes. False where it is damaged, or another decoder's affair.
static bool decode(Decoder* decoder, const uint8_t* data, size_t bytes, const View* view, uint8_t* to) {
  const auto& turbo = decoder->turbo;
  const auto frame = cut::frame_of(data, bytes);
  if (turbo.header(decoder->handle, data, bytes) != 0) {
    renew(decoder);
    return false;
  }
  if (!takes(turbo, decoder->handle) || turbo.get(decoder->handle, kWidth) != frame.width ||
      turbo.get(decoder->handle, kHeight) != frame.height) {
    return false;
  }
  const Region box = view->box;
  const int side = view->side;
  const auto columns = weights_of(box.width, view->width, view->x, side);
  const auto rows = weights_of(box.height, view->height, view->y, side);
  const int left = box.x + columns.begin(), right = box.x + columns.end();
  const int top = box.y + rows.begin(), height = rows.end() - rows.begin();
  const int mcu = kMcuWidth[turbo.get(decoder->handle, kSubsampling)];
  const int start = std::max(0, left - kMargin) / mcu * mcu;
  const int end = std::min(frame.width, right + kMargin);
  const size_t stride = 3 * static_cast<size_t>(end - start);
  make_room(decoder->part, stride * height + kSlack);
  const auto rest = cut::rows_of(data, bytes, frame, top, top + height, decoder->rows);
  if (turbo.crop(decoder->handle, {start, top - rest.above, end - start, height}) != 0 ||
      turbo.decompress(
          decoder->handle, rest.data, rest.bytes, decoder->part.data(), static_cast<int>(stride), kPixelFormatRgb) !=
          0) {
    renew(decoder);
    return false;
  }
  const auto fewer_rows = kAvx2 ? scale_down_avx2 : scale_down;
  const auto fewer_columns = kAvx2 ? scale_across_avx2 : scale_across;
  const Rows part{decoder->part.data() + 3 * (left - start), stride, rows.begin()};
  auto& between = decoder->between;
  // Pillow's order, from release 13 on: down first where that leaves much less to be done across.
  const int lower = box.height - view->height, narrower = box.width - view->width;
  if (lower > 0 && lower > 2 * narrower) {
    const size_t width = 3 * static_cast<size_t>(right - left), bytes = static_cast<size_t>(3) * side * side;
    make_room(between, width * side + kSlack);
    make_room(decoder->made, bytes + kSlack);
    fewer_rows(part, static_cast<int>(width), rows, between.data());
    fewer_columns({between.data(), width, columns.begin()}, side, columns, view->flip, decoder->made.data());
    std::memcpy(to, decoder->made.data(), bytes);
  } else {
    const size_t width = static_cast<size_t>(3) * side;
    make_room(between, width * height + kSlack);
    fewer_columns({part.first, stride, columns.begin()}, height, columns, view->flip, between.data());
    fewer_rows({between.data(), width, rows.begin()}, 3 * side, rows, to);
  }
  return true;
}

// A view of each JPEG -> (count, side, side, 3) bytes; `done` is 0 for those that another decoder has to look at.
void pixels_decode(
    Decoder* decoder, int count, const uint8_t* const* data, const size_t* bytes, const View* views, int side,
    uint8_t* to, uint8_t* done) {
  for (int i = 0; i < count; i++, to += static_cast<size_t>(3) * side * side) {
    done[i] = views[i].side == side && decode(decoder, data[i], bytes[i], &views[i], to);
  }
}

// Bytes of pixels, three colours each -> (byte - shift) x scale of their colour, in one pass.
#if defined(CPUTRAIN_AVX2)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void pixels_normalize(const uint8_t* from, float* to, size_t pixels, const float* shift, const float* scale) {
  constexpr size_t kBlock = 48;  // whole pixels and whole registers
  float shifts[kBlock], scales[kBlock];
  for (size_t i = 0; i < kBlock; i++) {
    shifts[i] = shift[i % 3];
    scales[i] = scale[i % 3];
  }
  const size_t bytes = 3 * pixels;
  size_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) {
    for (size_t i = 0; i < kBlock; i++) {
      to[at + i] = (static_cast<float>(from[at + i]) - shifts[i]) * scales[i];
    }
  }
  for (; at < bytes; at++) {
    to[at] = (static_cast<float>(from[at]) - shifts[at % kBlock]) * scales[at % kBlock];
  }
}
}
