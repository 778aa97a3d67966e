// What attention's gradients need beside products of matrices: bfloat16 matrices packed for AMX, and the softmax's
// gradient.

#pragma once

#include <cmath>

#include "transpose.hpp"

namespace {

// Writes rows of `columns` bfloat16 values as pairs of rows, (rows / 2, columns, 2); a last odd row is paired with
// zeros.
inline void pair_rows(const Bfloat16* from, size_t rows, size_t columns, size_t step, uint32_t* to) {
  for (size_t row = 0; row < rows; row += 2, to += columns) {
    const Bfloat16 *low = from + row * step, *high = row + 1 < rows ? low + step : nullptr;
    for (size_t c = 0; c < columns; ++c) to[c] = low[c] | (high == nullptr ? 0U : static_cast<uint32_t>(high[c]) << 16);
  }
}

// Writes the transpose of rows of `columns` bfloat16 values, an even number, as pairs of its rows: (columns / 2, rows,
// 2).
inline void pair_columns(const Bfloat16* from, size_t rows, size_t columns, size_t step, uint32_t* to) {
  const size_t words = columns / 2;
  const auto word = [&](size_t row, size_t w) {
    uint32_t value;
    std::memcpy(&value, from + row * step + 2 * w, sizeof(value));
    return value;
  };
  size_t row = 0;
  for (; row + kTileColumns <= rows; row += kTileColumns) {
    size_t w = 0;
    for (; w + kTileColumns <= words; w += kTileColumns) {
      Words16 tile[kTileColumns];
      for (size_t r = 0; r < kTileColumns; ++r) {
        std::memcpy(&tile[r], from + (row + r) * step + 2 * w, sizeof(tile[r]));
      }
      transpose_words(tile);
      for (size_t c = 0; c < kTileColumns; ++c) std::memcpy(to + (w + c) * rows + row, &tile[c], sizeof(tile[c]));
    }
    for (; w < words; ++w) {
      for (size_t r = row; r < row + kTileColumns; ++r) to[w * rows + r] = word(r, w);
    }
  }
  for (; row < rows; ++row) {
    for (size_t w = 0; w < words; ++w) to[w * rows + row] = word(row, w);
  }
}

// e^x for x <= 88 or so, to 2 units in the last place; NaN for NaN. (Cody and Waite's reduction, Taylor's series.)
inline Vector exponential(Vector x) {
  const Vector high{}, low = high - 104.0F;
  const Vector kept = x < low ? low : x;
  const Vector shifted = kept * 1.44269504F + 12582912.0F;  // rounds to an integer in the low bits
  const Vector whole = shifted - 12582912.0F;
  const Vector rest = kept - whole * 0.693359375F + whole * 2.12194440e-4F;
  Vector sum = rest * (1.0F / 5040) + 1.0F / 720;
  for (const float term : {1.0F / 120, 1.0F / 24, 1.0F / 6, 0.5F, 1.0F, 1.0F}) sum = sum * rest + term;
  // In two steps, as the power of a small result is no normal number.
  const Indices power = __builtin_convertvector(whole, Indices), half = power >> 1;
  const Vector scaled = sum * (Vector)((half + 127) << 23) * (Vector)((power - half + 127) << 23);
  return x != x ? x : scaled;
}

// From a row of scores and of the probabilities' gradients: probabilities e^(scale score - logsumexp), and scores'
// gradients scale p (dp - delta), rounded to bfloat16, in rows of `step` values, zero from `columns` on.
inline void softmax_gradient(const float* scores, const float* gradients, size_t columns, size_t step, float scale,
                             float logsumexp, float delta, Bfloat16* probabilities, Bfloat16* score_gradients) {
  const auto values = [&](Vector score, Vector gradient, Vector& p, Vector& ds) {
    p = exponential(score * scale - logsumexp);
    ds = p * (gradient - delta) * scale;
  };
  Vector p, ds;
  size_t c = 0;
  for (; c + kWidth <= columns; c += kWidth) {
    values(read(scores + c), read(gradients + c), p, ds);
    write(probabilities + c, p);
    write(score_gradients + c, ds);
  }
  if (c < columns) {
    float last[2][kWidth]{};
    std::copy(scores + c, scores + columns, last[0]);
    std::copy(gradients + c, gradients + columns, last[1]);
    values(read(last[0]), read(last[1]), p, ds);
    for (size_t i = 0; c < columns; ++c, ++i) {
      store(probabilities[c], p[i]);
      store(score_gradients[c], ds[i]);
    }
  }
  for (; c < step; ++c) probabilities[c] = score_gradients[c] = 0;
}

inline float dot(const Bfloat16* a, const Bfloat16* b, size_t count) {
  Vector sums{};
  size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) sums += read(a + i) * read(b + i);
  float sum = 0;
  for (; i < count; ++i) sum += load(a[i]) * load(b[i]);
  for (size_t lane = 0; lane < kWidth; ++lane) sum += sums[lane];
  return sum;
}

inline void narrow_row(const float* from, size_t count, Bfloat16* to) {
  for (size_t i = 0; i < count; ++i) store(to[i], from[i]);
}

}  // namespace
