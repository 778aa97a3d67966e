// Weights that are split into a bfloat16 and the 16 bits that it lacks of a float32, and loops over their blocks.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "rows.hpp"

namespace {

constexpr int64_t kBlockValues = 1 << 13;  // weights and gradients of a block, 64 KiB as float32, stay in the cache

// A weight of `size` values in memory order; struct _Weight of split_weights.py. The states are float32, of the same
// order. `lower` is what the bits of the float32 weight exceed those of `upper` by.
struct Weight {
  uint16_t* upper;
  int16_t* lower;
  const uint16_t* gradient;  // bfloat16
  float* states[3];
  float* step;
  int64_t size;
  int64_t is_first;
};

inline float joined(uint16_t upper, int16_t lower) {
  return std::bit_cast<float>((static_cast<uint32_t>(upper) << 16) + static_cast<uint32_t>(int32_t{lower}));
}

inline float widened(uint16_t upper) { return std::bit_cast<float>(static_cast<uint32_t>(upper) << 16); }

void join(const Weight& weight, int64_t from, int64_t count, float* to) {
  const uint16_t* upper = weight.upper + from;
  const int16_t* lower = weight.lower + from;
  for (int64_t i = 0; i < count; ++i) {
    to[i] = joined(upper[i], lower[i]);
  }
}

// Rounds to nearest, ties away from zero, so that the rest has 16 bits. A NaN is stored as the default one.
inline void split(float value, uint16_t& upper, int16_t& lower) {
  const uint32_t bits = value != value ? 0x7fc00000 : std::bit_cast<uint32_t>(value);
  upper = static_cast<uint16_t>((bits + 0x8000) >> 16);
  lower = static_cast<int16_t>(bits);
}

void split(const float* from, int64_t count, const Weight& weight, int64_t to) {
  for (int64_t i = 0; i < count; ++i) split(from[i], weight.upper[to + i], weight.lower[to + i]);
}

void widen(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = widened(from[i]);
}

// Calls work(weight, first value, number of values) for the blocks of all weights, on torch's threads.
template <typename Work>
void in_blocks(const Weight* weights, int64_t count, const Work& work) {
  std::vector<int64_t> ends(count);  // number of blocks up to and with each weight
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) ends[i] = blocks += (weights[i].size + kBlockValues - 1) / kBlockValues;
  share(blocks, blocks * kBlockValues, at::get_num_threads(), [&](size_t begin, size_t end) {
    for (int64_t block = static_cast<int64_t>(begin); block < static_cast<int64_t>(end); ++block) {
      const int64_t i = std::upper_bound(ends.begin(), ends.end(), block) - ends.begin();
      const int64_t from = (block - (i == 0 ? 0 : ends[i - 1])) * kBlockValues;
      work(weights[i], from, std::min(kBlockValues, weights[i].size - from));
    }
  });
}

at::Tensor view(float* values, int64_t count) { return at::from_blob(values, {count}, at::kFloat); }

}  // namespace
