// Scales RGB bytes like Pillow: antialiased bilinear, in the same fixed-point arithmetic, with identical results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && !defined(CPUTRAIN_PLAIN)
#define CPUTRAIN_AVX2
#include <immintrin.h>
#endif

namespace scale {
namespace {  // only pixels.cpp includes this file

constexpr int kSlack = 16;  // bytes that may be read or written past a buffer's last row

// Pillow's fixed-point numbers: weights of 22 bits leave 8 for the pixel and 2 for the sum.
constexpr int kWeightBits = 32 - 8 - 2;
constexpr int kHalf = 1 << (kWeightBits - 1);

// Weights of the inputs of each output: `taps` per output (an even number, padded with 0), of which `count` are used,
// from input `first` on.
struct Weights {
  int taps;
  std::vector<int> first, count, values;

  int begin() const { return first.front(); }
  int end() const { return first.back() + count.back(); }
  const int* of(size_t output) const { return &values[output * taps]; }
};

// Returns the weights of the outputs [from, from + outputs) of `in` inputs scaled to `out`: triangles as wide as one
// output or one input, whichever is wider.
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

// Rows of bytes, `stride` apart; `begin` is the index of the first row in the weights.
struct Rows {
  const uint8_t* first;
  size_t stride;
  int begin;
};

// No sum exceeds a byte, as the weights are positive and add up to 1.
inline uint8_t rounded(int sum) {
  return static_cast<uint8_t>(sum >> kWeightBits);
}

// Returns byte x of an output row.
inline uint8_t down(const uint8_t* rows, size_t stride, const int* weight, int count, int x) {
  int sum = kHalf;
  for (int k = 0; k < count; k++) {
    sum += rows[k * stride + x] * weight[k];
  }
  return rounded(sum);
}

// Scales `bytes` of each row vertically to as many rows as there are weights.
void scale_down(const Rows& in, int bytes, const Weights& weights, uint8_t* to) {
  for (size_t y = 0; y < weights.first.size(); y++, to += bytes) {
    const uint8_t* rows = in.first + in.stride * (weights.first[y] - in.begin);
    for (int x = 0; x < bytes; x++) {
      to[x] = down(rows, in.stride, weights.of(y), weights.count[y], x);
    }
  }
}

// Scales `count` rows of RGB pixels horizontally to as many pixels as there are weights, mirrored if `flip` is set.
void scale_across(const Rows& in, int count, const Weights& weights, bool flip, uint8_t* to) {
  const size_t outputs = weights.first.size();
  for (int y = 0; y < count; y++) {
    for (size_t x = 0; x < outputs; x++) {
      const size_t output = flip ? outputs - 1 - x : x;
      const uint8_t* pixel = in.first + y * in.stride + 3 * (weights.first[output] - in.begin);
      for (int color = 0; color < 3; color++) {
        *to++ = down(pixel + color, 3, weights.of(output), weights.count[output], 0);
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
      // Packing works within each half of a register, so the words come out interleaved.
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

constexpr int kTile = 32;  // rows that stay in the cache while all their outputs are computed
constexpr int kLower = 11;  // bits in the lower part of a weight

// Two neighboring outputs of a tile of rows: where their inputs begin in the first row, and their weights, for two
// inputs at a time and three colors (the fourth slot is unused). A weight is split into its upper and lower bits, as
// 16-bit numbers whose sums are combined at the end, so that no bit is lost.
struct Pair {
  const uint8_t* from[2];
  const __m256i* upper;
  const __m256i* lower;
  size_t steps;
  bool last;      // in a row: nothing may be written after it
  bool complete;  // false if the second output does not exist
};

// `kSteps` is the pair's `steps` if they are known at compile time, else 0.
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
    const size_t column = std::min(x, outputs - 1), output = flip ? outputs - 1 - column : column;
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
}  // namespace scale
