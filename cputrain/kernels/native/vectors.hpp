// Vectors of float32, read from and written to float32 and bfloat16, and the size of a block of sums in registers.

#pragma once

#include <cstddef>
#include <cstdint>

#include "values.hpp"

namespace {

#ifdef __AVX512F__
constexpr size_t kWidth = 16;  // floats in a vector
#else
constexpr size_t kWidth = 8;
#endif
constexpr size_t kVectors = kWidth == 16 ? 4 : 2;  // vectors in a panel of columns, whose sums are in registers
constexpr size_t kPanel = kVectors * kWidth;
constexpr size_t kRows = kWidth == 16 ? 6 : 5;  // rows of the block of sums in registers
constexpr size_t kGap = 16;  // values between matrices, because power-of-two distances map to the same cache sets

typedef float Vector __attribute__((vector_size(kWidth * sizeof(float)), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * sizeof(uint16_t)), aligned(2)));
typedef uint32_t Words __attribute__((vector_size(kWidth * sizeof(uint32_t))));
typedef int32_t Indices __attribute__((vector_size(kWidth * sizeof(int32_t))));

inline Vector read(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline Vector read(const Bfloat16* from) {
  return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16);
}
inline void write(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline void write(Bfloat16* to, Vector value) {  // rounds like store()
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words number = (Words)(value == value);
  const Words kept = (rounded & number) | (~number & 0x7fc0);
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(kept, Halves);
}

// Whether all values are finite.
inline bool all_finite(const float* values, size_t count) {
  Vector zeros{};
  size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) zeros += read(values + i) * 0.0F;
  float sum = 0;
  for (; i < count; ++i) sum += values[i] * 0.0F;
  for (size_t lane = 0; lane < kWidth; ++lane) sum += zeros[lane];
  return sum == 0.0F;
}

}  // namespace
