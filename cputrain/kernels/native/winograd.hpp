// Winograd's minimal filtering F(4x4, 3x3), vectorized over channels: transforms of tiles and weights, and their
// products. Lavin and Gray 2016 (arXiv:1509.09308); blocking after Jia et al., PPoPP 2018.
//
// For one tile, y = A^T [(G g G^T) * (B^T d B)] A, where d is a 6 x 6 patch of the input and y has 4 x 4 outputs.
// Transformed tiles are stored as 36 matrices of tiles x channels, so that the sum over channels is 36 matrix products.

#pragma once

#include "rows.hpp"
#include "vectors.hpp"

namespace {

constexpr size_t kPoints = 36, kIn = 6, kOut = 4, kTaps = 9;

// B^T d: six values to six.
inline void transform_input(const Vector* d, Vector* v) {
  const Vector even = d[4] - 4.0F * d[2], odd = d[3] - 4.0F * d[1];
  const Vector far = d[4] - d[2], near = 2.0F * (d[3] - d[1]);
  v[0] = 4.0F * d[0] - 5.0F * d[2] + d[4];
  v[1] = even + odd;
  v[2] = even - odd;
  v[3] = far + near;
  v[4] = far - near;
  v[5] = 4.0F * d[1] - 5.0F * d[3] + d[5];
}

// A^T m: six values to four.
inline void transform_output(const Vector* m, Vector* y) {
  const Vector a = m[1] + m[2], b = m[1] - m[2], c = m[3] + m[4], d = m[3] - m[4];
  y[0] = m[0] + a + c;
  y[1] = b + 2.0F * d;
  y[2] = a + 4.0F * c;
  y[3] = b + 8.0F * d + m[5];
}

// A y: four values to six, the transpose of transform_output.
inline void transform_gradient(const Vector* y, Vector* m) {
  const Vector a = y[0] + y[2], b = y[1] + y[3], c = y[0] + 4.0F * y[2], d = 2.0F * y[1] + 8.0F * y[3];
  m[0] = y[0];
  m[1] = a + b;
  m[2] = a - b;
  m[3] = c + d;
  m[4] = c - d;
  m[5] = y[3];
}

// G g: three values to six.
inline void transform_weight(const Vector* g, Vector* u) {
  const Vector a = (-1.0F / 6) * (g[0] + g[2]), b = (-1.0F / 6) * g[1];
  const Vector c = (1.0F / 24) * g[0] + (1.0F / 6) * g[2], d = (1.0F / 12) * g[1];
  u[0] = 0.25F * g[0];
  u[1] = a + b;
  u[2] = a - b;
  u[3] = c + d;
  u[4] = c - d;
  u[5] = g[2];
}

// G^T s: six values to three, the transpose of transform_weight.
inline void transform_weight_gradient(const Vector* s, Vector* g) {
  const Vector a = s[1] + s[2], c = s[3] + s[4];
  g[0] = 0.25F * s[0] - (1.0F / 6) * a + (1.0F / 24) * c;
  g[1] = (1.0F / 6) * (s[2] - s[1]) + (1.0F / 12) * (s[3] - s[4]);
  g[2] = (1.0F / 6) * (c - a) + s[5];
}

// Applies `transform` to the columns, then to the rows: `kFrom` x `kFrom` vectors to `kTo` x `kTo`.
template <size_t kFrom, size_t kTo, typename Transform>
inline void both_ways(const Vector (&from)[kFrom][kFrom], Vector (&to)[kTo][kTo], const Transform& transform) {
  Vector half[kTo][kFrom];
  for (size_t j = 0; j < kFrom; ++j) {
    Vector column[kFrom], done[kTo];
    for (size_t i = 0; i < kFrom; ++i) column[i] = from[i][j];
    transform(column, done);
    for (size_t i = 0; i < kTo; ++i) half[i][j] = done[i];
  }
  for (size_t i = 0; i < kTo; ++i) transform(half[i], to[i]);
}

// Transposes a square of kWidth vectors.
inline void transpose(Vector* rows) {
#ifdef __clang__
  float values[kWidth][kWidth];
  for (size_t i = 0; i < kWidth; ++i) write(values[i], rows[i]);
  for (size_t i = 0; i < kWidth; ++i) {
    for (size_t j = 0; j < kWidth; ++j) rows[i][j] = values[j][i];
  }
#else
  for (size_t step = 1; step < kWidth; step *= 2) {
    Indices low, high;
    for (size_t i = 0; i < kWidth; ++i) {
      const bool second = (i & step) != 0;
      low[i] = static_cast<int32_t>(second ? kWidth + (i - step) : i);
      high[i] = static_cast<int32_t>(second ? kWidth + i : i + step);
    }
    for (size_t i = 0; i < kWidth; ++i) {
      if ((i & step) == 0) {
        const Vector a = rows[i], b = rows[i + step];
        rows[i] = __builtin_shuffle(a, b, low);
        rows[i + step] = __builtin_shuffle(a, b, high);
      }
    }
  }
#endif
}

// Multiplies `kHeight` rows of a by `kColumns` vectors of b over `depth`: out(r, :) = sum a(r, i) b(i, :), or += with
// `add`. a(r, i) is at r x row_step + i x depth_step.
template <size_t kHeight, size_t kColumns>
inline void block(const float* a, size_t row_step, size_t depth_step, const float* b, size_t b_step, size_t depth,
                  float* out, size_t out_step, bool add) {
  Vector sums[kHeight][kColumns];
  for (size_t r = 0; r < kHeight; ++r) {
    for (size_t j = 0; j < kColumns; ++j) sums[r][j] = add ? read(out + r * out_step + j * kWidth) : Vector{};
  }
  for (size_t i = 0; i < depth; ++i) {
    Vector columns[kColumns];
    for (size_t j = 0; j < kColumns; ++j) columns[j] = read(b + i * b_step + j * kWidth);
#pragma GCC unroll 6
    for (size_t r = 0; r < kHeight; ++r) {
      const float value = a[r * row_step + i * depth_step];
      for (size_t j = 0; j < kColumns; ++j) sums[r][j] += value * columns[j];
    }
  }
  for (size_t r = 0; r < kHeight; ++r) {
    for (size_t j = 0; j < kColumns; ++j) write(out + r * out_step + j * kWidth, sums[r][j]);
  }
}

// Multiplies `rows` rows by one panel of `kColumns` vectors.
template <size_t kColumns>
void panel(const float* a, size_t row_step, size_t depth_step, size_t rows, const float* b, size_t b_step, size_t depth,
           float* out, size_t out_step, bool add) {
  size_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    block<kRows, kColumns>(a + r * row_step, row_step, depth_step, b, b_step, depth, out + r * out_step, out_step, add);
  }
  const float* left = a + r * row_step;
  float* place = out + r * out_step;
  switch (rows - r) {
    case 5: block<5, kColumns>(left, row_step, depth_step, b, b_step, depth, place, out_step, add); break;
    case 4: block<4, kColumns>(left, row_step, depth_step, b, b_step, depth, place, out_step, add); break;
    case 3: block<3, kColumns>(left, row_step, depth_step, b, b_step, depth, place, out_step, add); break;
    case 2: block<2, kColumns>(left, row_step, depth_step, b, b_step, depth, place, out_step, add); break;
    case 1: block<1, kColumns>(left, row_step, depth_step, b, b_step, depth, place, out_step, add); break;
    default: break;
  }
}

// Multiplies `rows` rows by one panel of `vectors` vectors.
inline void product(const float* a, size_t row_step, size_t depth_step, size_t rows, const float* b, size_t b_step,
                    size_t depth, float* out, size_t out_step, size_t vectors, bool add) {
  switch (vectors) {
    case 4: panel<4>(a, row_step, depth_step, rows, b, b_step, depth, out, out_step, add); break;
    case 3: panel<3>(a, row_step, depth_step, rows, b, b_step, depth, out, out_step, add); break;
    case 2: panel<2>(a, row_step, depth_step, rows, b, b_step, depth, out, out_step, add); break;
    default: panel<1>(a, row_step, depth_step, rows, b, b_step, depth, out, out_step, add); break;
  }
}

}  // namespace
