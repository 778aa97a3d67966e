// Load and store values of images: float32 and bfloat16, computed in float32.

#pragma once

#include <bit>
#include <cstdint>

// Marks a loop with independent iterations, because inlining loses __restrict.
#define INDEPENDENT _Pragma("GCC ivdep")

namespace {

using Bfloat16 = uint16_t;  // not a struct, which compilers do not vectorize

inline float load(float value) { return value; }
inline float load(Bfloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

inline void store(float& place, float value) { place = value; }
inline void store(Bfloat16& place, float value) {  // round to nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  place = static_cast<uint16_t>((value != value ? 0x7fc00000 : rounded) >> 16);
}

}  // namespace
