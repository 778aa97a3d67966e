// Sums and products of bfloat16 that round to nearest, ties to even, on every processor; oneCCL's own ones truncate on
// processors without AVX512-BF16. oneCCL accepts custom functions only for all-reduces over libfabric.
#pragma once

#include <bit>
#include <cstdint>

#include <oneapi/ccl.hpp>

namespace cputrain {

inline float widened(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t rounded(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto nearest = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  return value != value ? static_cast<uint16_t>(0x7fc0) : nearest;
}

void add_bfloat16(const uint16_t* in, uint16_t* inout, size_t count);
void multiply_bfloat16(const uint16_t* in, uint16_t* inout, size_t count);

template <void (*Combine)(const uint16_t*, uint16_t*, size_t)>
void reduce_bfloat16(
    const void* in, size_t count, void* inout, size_t* out_count, ccl::datatype, const ccl::fn_context*) {
  Combine(static_cast<const uint16_t*>(in), static_cast<uint16_t*>(inout), count);
  if (out_count != nullptr) {
    *out_count = count;
  }
}

}  // namespace cputrain
