// Activations after batch-norm: what they make of a value, and of a gradient.
//
// gradient(g, map) is g times the derivative at the activation's input, which may be replaced by its output where
// kKeepsOutput: both are then on the same side of each bend. kCostly are those whose gradients take longer to compute
// than to read and write. Without branches, so that loops of them are vectorized.

#pragma once

#include <bit>
#include <cstdint>

namespace {

struct NoActivation {
  static constexpr bool kKeepsOutput = true, kCostly = false;
  float value(float z) const { return z; }
  float gradient(float g, float) const { return g; }
};

struct Relu {
  static constexpr bool kKeepsOutput = true, kCostly = false;
  float value(float z) const { return z < 0 ? 0 : z; }  // keeps NaN
  float gradient(float g, float map) const { return map <= 0 ? 0 : g; }
};

struct Relu6 {
  static constexpr bool kKeepsOutput = true, kCostly = false;
  float value(float z) const {
    const float positive = z < 0 ? 0 : z;
    return positive > 6 ? 6 : positive;
  }
  float gradient(float g, float map) const {
    const float positive = map <= 0 ? 0 : g;
    return map >= 6 ? 0 : positive;
  }
};

struct LeakyRelu {
  static constexpr bool kKeepsOutput = true, kCostly = false;
  float slope;  // positive
  float value(float z) const { return z > 0 ? z : z * slope; }
  float gradient(float g, float map) const { return map > 0 ? g : g * slope; }
};

struct Hardswish {
  static constexpr bool kKeepsOutput = false, kCostly = false;
  float value(float z) const {
    const float moved = z + 3, positive = moved < 0 ? 0 : moved, bent = z * positive * (1 / 6.0F);
    return z >= 3 ? z : bent;
  }
  float gradient(float g, float z) const {
    const float bent = g * (z * (1 / 3.0F) + 0.5F), upper = z < 3 ? bent : g;
    return z <= -3 ? 0 : upper;
  }
};

constexpr float kLowest = -87;  // values below are not told from it: e^87 is almost the largest number

inline float multiplied_and_added(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Returns 1 + e^-x for x above -88; its reciprocal, the sigmoid, is at most 2.4 units in the last place off. The
// exponential is by Cody and Waite's method ("Software Manual for the Elementary Functions", 1980) with the polynomial
// of Cephes' expf.
inline float one_plus_exponential(float x) {
  constexpr float kRound = 12582912;  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits
  const float above = x < kLowest ? kLowest : x, limited = above > -kLowest ? -kLowest : above;
  const float shifted = multiplied_and_added(limited, -1.44269504F, kRound), whole = shifted - kRound;
  const float near = multiplied_and_added(whole, -0.693359375F, -limited);
  const float rest = multiplied_and_added(whole, 2.12194440e-4F, near);
  float sum = multiplied_and_added(1.9875691500e-4F, rest, 1.3981999507e-3F);
  sum = multiplied_and_added(sum, rest, 8.3334519073e-3F);
  sum = multiplied_and_added(sum, rest, 4.1665795894e-2F);
  sum = multiplied_and_added(sum, rest, 1.6666665459e-1F);
  sum = multiplied_and_added(sum, rest, 5.0000001201e-1F);
  const float part = multiplied_and_added(sum, rest * rest, rest) + 1;
  const uint32_t power = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound) + 127;
  return multiplied_and_added(part, std::bit_cast<float>(power << 23), 1);  // part times 2^whole, plus 1
}

struct Silu {
  static constexpr bool kKeepsOutput = false, kCostly = true;
  float value(float z) const {
    const float exact = z / one_plus_exponential(z);
    return z < kLowest ? z * 0 : exact;  // NaN for infinity, as torch's
  }
  float gradient(float g, float z) const {
    const float inverse = 1 / one_plus_exponential(z), sigmoid = z < kLowest ? 0 : inverse;
    return g * (sigmoid * (1 + z * (1 - sigmoid)));
  }
};

}  // namespace
