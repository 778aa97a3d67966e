// Transposes matrices of 16-bit values, which torch copies at a fraction of the speed of memory.

#pragma once

#include <cstring>

#include "rows.hpp"
#include "vectors.hpp"

namespace {

constexpr size_t kTileColumns = 16;            // columns of a tile, of 2 x kTileColumns rows
constexpr size_t kStripe = 2 * kTileColumns;  // columns whose values in a row fill a cache line

typedef uint32_t Words16 __attribute__((vector_size(kTileColumns * sizeof(uint32_t))));
typedef uint16_t Halves16 __attribute__((vector_size(kTileColumns * sizeof(uint16_t)), aligned(2)));

// Swaps the off-diagonal blocks of kStep x kStep words within blocks of twice that size.
template <int kStep>
inline void swap_blocks(Words16 (&tile)[kTileColumns]) {
  Words16 low, high;
  for (size_t i = 0; i < kTileColumns; ++i) {
    const bool upper = (i & kStep) != 0;
    low[i] = upper ? kTileColumns + i - kStep : i;
    high[i] = upper ? kTileColumns + i : i + kStep;
  }
#pragma GCC unroll 16
  for (size_t row = 0; row < kTileColumns; ++row) {
    if ((row & kStep) != 0) continue;
    const Words16 first = tile[row], second = tile[row + kStep];
    tile[row] = __builtin_shuffle(first, second, low);
    tile[row + kStep] = __builtin_shuffle(first, second, high);
  }
}

inline void transpose_words(Words16 (&tile)[kTileColumns]) {
  swap_blocks<8>(tile);
  swap_blocks<4>(tile);
  swap_blocks<2>(tile);
  swap_blocks<1>(tile);
}

// Writes kTileColumns columns, of 2 x kTileColumns rows `step` values apart, as rows `to_step` values apart.
inline void transpose_tile(const uint16_t* from, size_t step, uint16_t* to, size_t to_step) {
  Words16 tile[kTileColumns];
  for (size_t pair = 0; pair < kTileColumns; ++pair) {
    Halves16 low, high;
    std::memcpy(&low, from + 2 * pair * step, sizeof(low));
    std::memcpy(&high, from + (2 * pair + 1) * step, sizeof(high));
    tile[pair] = __builtin_convertvector(low, Words16) | __builtin_convertvector(high, Words16) << 16;
  }
  transpose_words(tile);
  for (size_t row = 0; row < kTileColumns; ++row) std::memcpy(to + row * to_step, &tile[row], sizeof(tile[row]));
}

// Writes part of a matrix of `rows` rows, one value after the other.
inline void copy(const uint16_t* from, size_t row, size_t last_row, size_t column, size_t last_column, size_t step,
                 size_t rows, uint16_t* to) {
  for (size_t c = column; c < last_column; ++c) {
    for (size_t r = row; r < last_row; ++r) to[c * rows + r] = from[r * step + c];
  }
}

// Writes a matrix of `rows` rows, `step` values apart, as (columns, rows).
inline void transpose(const uint16_t* from, size_t rows, size_t columns, size_t step, int threads, uint16_t* to) {
  const size_t stripes = (columns + kStripe - 1) / kStripe;
  share(stripes, rows * columns, threads, [&](size_t first, size_t end) {
    for (size_t begin = first * kStripe; begin < std::min(columns, end * kStripe); begin += kStripe) {
      const size_t stop = std::min(columns, begin + kStripe);
      size_t row = 0;
      for (; row + 2 * kTileColumns <= rows; row += 2 * kTileColumns) {
        size_t column = begin;
        for (; column + kTileColumns <= stop; column += kTileColumns) {
          transpose_tile(from + row * step + column, step, to + column * rows + row, rows);
        }
        copy(from, row, row + 2 * kTileColumns, column, stop, step, rows, to);
      }
      copy(from, row, rows, begin, stop, step, rows, to);
    }
  });
}

}  // namespace
