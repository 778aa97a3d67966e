// One JPEG -> one square of RGB bytes: only the rows and columns that are needed are decoded (libjpeg-turbo), then
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
  int (*set)(void*, int, int);
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
constexpr int kStopOnWarning = 0, kSubsampling = 4, kWidth = 5, kHeight = 6, kPrecision = 7, kColorspace = 8;
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

// Two pixels at a time; reads up to kSlack bytes past the last row's end and writes one past its own.
__attribute__((target("avx2"))) void scale_across_avx2(
    const Rows& in, int count, const Weights& weights, bool flip, uint8_t* to) {
  const size_t outputs = weights.first.size(), pairs = weights.taps / 2;
  std::vector<int> doubled(outputs * pairs * 8);  // of two neighbours' weights, each for three colours
  std::vector<size_t> starts(outputs), used(outputs);
  for (size_t x = 0; x < outputs; x++) {
    const size_t output = flip ? outputs - 1 - x : x;
    for (size_t k = 0; k < pairs; k++) {
      int* both = &doubled[(x * pairs + k) * 8];
      std::fill(both, both + 3, weights.of(output)[2 * k]);
      std::fill(both + 4, both + 7, weights.of(output)[2 * k + 1]);
    }
    starts[x] = 3 * static_cast<size_t>(weights.first[output] - in.begin);
    used[x] = (weights.count[output] + 1) / 2;
  }
  const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m128i gather = _mm_setr_epi8(0, 4, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m128i half = _mm_set1_epi32(kHalf);
  const uint8_t* row = in.first;
  for (int y = 0; y < count; y++, row += in.stride) {
    const int* weight = doubled.data();
    for (size_t x = 0; x < outputs; x++, to += 3, weight += 8 * pairs) {
      const uint8_t* pixel = row + starts[x];
      __m256i sums = _mm256_castsi128_si256(half);
      sums = _mm256_inserti128_si256(sums, _mm_setzero_si128(), 1);
      for (size_t k = 0; k < used[x]; k++, pixel += 6) {
        const __m128i two = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(pixel));
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_shuffle_epi8(two, spread));
        const __m256i by = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight + 8 * k));
        sums = _mm256_add_epi32(sums, _mm256_mullo_epi32(wide, by));
      }
      const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
      const int made = _mm_cvtsi128_si32(_mm_shuffle_epi8(_mm_srai_epi32(sum, kWeightBits), gather));
      std::memcpy(to, &made, 4);
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

// A thread's decoder and its buffers.
struct Decoder {
  Turbo turbo;
  void* handle;
  std::vector<uint8_t> part, between, made;
};

static void* new_handle(const Turbo& turbo) {
  void* made = turbo.init(kInitDecompress);
  turbo.set(made, kStopOnWarning, 1);
  return made;
}

// TurboJPEG's handle goes on with a header that it has failed in, and then fails in every other one: a new one.
static void renew(Decoder* decoder) {
  decoder->turbo.destroy(decoder->handle);
  decoder->handle = new_handle(decoder->turbo);
}

Decoder* pixels_open(const Turbo* turbo) {
  return new Decoder{*turbo, new_handle(*turbo), {}, {}, {}};
}

void pixels_close(Decoder* decoder) {
  decoder->turbo.destroy(decoder->handle);
  delete decoder;
}

// Width and height of a JPEG that pixels_decode takes: 8 bits, gray or three colours, an end marker at its end. 0 for
// all else, which is another decoder's affair.
int pixels_size(Decoder* decoder, const uint8_t* data, size_t bytes, int* width, int* height) {
  const auto& turbo = decoder->turbo;
  if (bytes < 4 || data[0] != 0xff || data[1] != 0xd8 || data[bytes - 2] != 0xff || data[bytes - 1] != 0xd9) {
    return 0;
  }
  if (turbo.header(decoder->handle, data, bytes) != 0) {
    renew(decoder);
    return 0;
  }
  *width = turbo.get(decoder->handle, kWidth);
  *height = turbo.get(decoder->handle, kHeight);
  const int colours = turbo.get(decoder->handle, kColorspace);
  const int subsampling = turbo.get(decoder->handle, kSubsampling);
  return turbo.get(decoder->handle, kPrecision) == 8 && subsampling >= 0 &&
         subsampling < static_cast<int>(std::size(kMcuWidth)) &&
         (colours == kRgb || colours == kYCbCr || colours == kGray);
}

// A view of the JPEG that pixels_size has just taken -> (side, side, 3) bytes. 0 where the data is damaged.
int pixels_decode(Decoder* decoder, const uint8_t* data, size_t bytes, const View* view, uint8_t* to) {
  const auto& turbo = decoder->turbo;
  const Region box = view->box;
  const int side = view->side;
  const auto columns = weights_of(box.width, view->width, view->x, side);
  const auto rows = weights_of(box.height, view->height, view->y, side);
  const int left = box.x + columns.begin(), right = box.x + columns.end();
  const int top = box.y + rows.begin(), height = rows.end() - rows.begin();
  const int mcu = kMcuWidth[turbo.get(decoder->handle, kSubsampling)];
  const int start = std::max(0, left - kMargin) / mcu * mcu;
  const int end = std::min(turbo.get(decoder->handle, kWidth), right + kMargin);
  const size_t stride = 3 * static_cast<size_t>(end - start);
  decoder->part.resize(stride * height + kSlack);
  if (turbo.crop(decoder->handle, {start, top, end - start, height}) != 0 ||
      turbo.decompress(
          decoder->handle, data, bytes, decoder->part.data(), static_cast<int>(stride), kPixelFormatRgb) != 0) {
    renew(decoder);
    return 0;
  }
  const auto fewer_rows = kAvx2 ? scale_down_avx2 : scale_down;
  const auto fewer_columns = kAvx2 ? scale_across_avx2 : scale_across;
  const Rows part{decoder->part.data() + 3 * (left - start), stride, rows.begin()};
  auto& between = decoder->between;
  // Pillow's order, from release 13 on: down first where that leaves much less to be done across.
  const int lower = box.height - view->height, narrower = box.width - view->width;
  if (lower > 0 && lower > 2 * narrower) {
    const size_t width = 3 * static_cast<size_t>(right - left), bytes = static_cast<size_t>(3) * side * side;
    between.resize(width * side + kSlack);
    decoder->made.resize(bytes + kSlack);
    fewer_rows(part, static_cast<int>(width), rows, between.data());
    fewer_columns({between.data(), width, columns.begin()}, side, columns, view->flip, decoder->made.data());
    std::memcpy(to, decoder->made.data(), bytes);
  } else {
    const size_t width = static_cast<size_t>(3) * side;
    between.resize(width * height + kSlack);
    fewer_columns({part.first, stride, columns.begin()}, height, columns, view->flip, between.data());
    fewer_rows({between.data(), width, rows.begin()}, 3 * side, rows, to);
  }
  return 1;
}
}
