// Norms of split weights and of their gradients, and LAMB, with the bits of torch's operators.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/sqrt_cpu_dispatch.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "split_values.hpp"
#include "values.hpp"

namespace {

// Calls work(weight, index) for all weights, each on one of torch's threads.
template <typename Work>
void in_layers(const Weight* weights, int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  size_t values = 0;
  for (int64_t i = 0; i < count; ++i) values += weights[i].size;
  share(std::min<int64_t>(count, at::get_num_threads()), values, at::get_num_threads(), [&](size_t, size_t) {
    for (int64_t i = next++; i < count; i = next++) work(weights[i], i);
  });
}

typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats16 __attribute__((vector_size(64)));
typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef int32_t Integers8 __attribute__((vector_size(32)));
typedef int32_t Integers16 __attribute__((vector_size(64)));
typedef uint16_t Halves8 __attribute__((vector_size(16)));
typedef uint16_t Halves16 __attribute__((vector_size(32)));
typedef int16_t Rests8 __attribute__((vector_size(16)));
typedef int16_t Rests16 __attribute__((vector_size(32)));

template <int kLanes>
struct Lanes {
  template <typename If16, typename If8>
  using Of = std::conditional_t<kLanes == 16, If16, If8>;
  using Floats = Of<Floats16, Floats8>;
  using Words = Of<Words16, Words8>;

  template <typename Vector, typename Value>
  static Vector read(const Value* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
  }

  static Floats widened(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(read<Of<Halves16, Halves8>>(from), Words) << 16);
  }

  static Floats joined(const uint16_t* upper, const int16_t* lower) {
    const auto rest = __builtin_convertvector(read<Of<Rests16, Rests8>>(lower), Of<Integers16, Integers8>);
    return (Floats)((Words)widened(upper) + (Words)rest);
  }
};

// Norms of two sequences of values that come in blocks, of which only the last one may have a part of the lanes. Torch
// adds squares in memory order in as many lanes as its vectors have, in one operation with the product (kFused) or not,
// by how it was compiled. Each norm is a chain of sums; two at once take the time of one.
template <int kLanes, bool kFused>
class TwoNorms {
  using Floats = typename Lanes<kLanes>::Floats;

 public:
  // Adds the values whose vectors are first(i) and second(i); one(i) and other(i) are single ones.
  template <typename First, typename Second, typename One, typename Other>
  void add(int64_t count, const First& first, const Second& second, const One& one, const Other& other) {
    const int64_t whole = count - count % kLanes;
    Floats a = first_, b = second_;  // in registers
    for (int64_t i = 0; i < whole; i += kLanes) {
      a = added(a, first(i));
      b = added(b, second(i));
    }
    first_ = a;
    second_ = b;
    rest_ = count - whole;
    for (int64_t i = 0; i < rest_; ++i) {
      first_rest_[i] = one(whole + i);
      second_rest_[i] = other(whole + i);
    }
  }

  void add(int64_t count, const float* first, const float* second) {
    const auto vectors = [](const float* from) {
      return [=](int64_t i) { return Lanes<kLanes>::template read<Floats>(from + i); };
    };
    const auto values = [](const float* from) { return [=](int64_t i) { return from[i]; }; };
    add(count, vectors(first), vectors(second), values(first), values(second));
  }

  void write(float* norms) const {
    norms[0] = norm(first_, first_rest_);
    norms[1] = norm(second_, second_rest_);
  }

 private:
  static Floats added(Floats sum, Floats values) {
    if constexpr (!kFused) return sum + values * values;
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] = std::fma(values[lane], values[lane], sum[lane]);
    return sum;
  }

  float norm(const Floats& lanes, const float* rest) const {
    float sum = lanes[0];
    for (int lane = 1; lane < kLanes; ++lane) sum += lanes[lane];
    int64_t i = 0;
    for (; i < rest_ - rest_ % 4; ++i) sum += rest[i] * rest[i];  // by torch's compiler: four squares in a vector
    for (; i < rest_; ++i) sum = std::fma(rest[i], rest[i], sum);
    return std::sqrt(sum);
  }

  Floats first_{}, second_{};
  float first_rest_[kLanes], second_rest_[kLanes];
  int64_t rest_ = 0;
};

template <int kLanes, bool kFused>
void write_norms(const Weight& weight, bool of_weight, float* norms) {
  using Read = Lanes<kLanes>;
  TwoNorms<kLanes, kFused> both;
  const auto gradients = [&](int64_t i) { return Read::widened(weight.gradient + i); };
  const auto gradient = [&](int64_t i) { return widened(weight.gradient[i]); };
  const auto values = [&](int64_t i) { return Read::joined(weight.upper + i, weight.lower + i); };
  const auto value = [&](int64_t i) { return joined(weight.upper[i], weight.lower[i]); };
  if (of_weight) {
    both.add(weight.size, values, gradients, value, gradient);
  } else {
    both.add(weight.size, gradients, gradients, gradient, gradient);
  }
  both.write(norms);
}

// Options of LAMB for a weight; struct LambOptions of split_layers.py.
struct Lamb {
  float lerp, beta2, square, added, correction, decay, ratio, rate;
};

inline float update_of(float value, float mean, float root, const Lamb& by) {
  return std::fma(value, by.decay, mean / (root + by.added) * by.correction);
}

// torch's own roots, which may be MKL's and not rounded to nearest.
void write_roots(float* squares, int64_t count, float* roots) {
  at::Tensor to = view(roots, count);
  at::cpu::sqrt_out(to, view(squares, count));
}

template <int kLanes, bool kFused>
void average(const Weight& weight, const Lamb by, float* norms) {
  alignas(64) float wide[kBlockValues], roots[kBlockValues];
  TwoNorms<kLanes, kFused> both;
  for (int64_t from = 0; from < weight.size; from += kBlockValues) {
    const int64_t size = std::min(kBlockValues, weight.size - from);
    const uint16_t* __restrict upper = weight.upper + from;
    const int16_t* __restrict lower = weight.lower + from;
    const uint16_t* __restrict gradient = weight.gradient + from;
    float* __restrict means = weight.states[0] + from;
    float* __restrict squares = weight.states[1] + from;
    INDEPENDENT
    for (int64_t i = 0; i < size; ++i) {
      const float change = widened(gradient[i]);
      wide[i] = joined(upper[i], lower[i]);
      means[i] = std::fma(by.lerp, change - means[i], means[i]);
      squares[i] = std::fma(by.square * change, change, squares[i] * by.beta2);
    }
    write_roots(squares, size, roots);
    INDEPENDENT
    for (int64_t i = 0; i < size; ++i) roots[i] = update_of(wide[i], means[i], roots[i], by);
    both.add(size, wide, roots);
  }
  both.write(norms);
}

void update_by(const Weight& weight, int64_t from, int64_t size, const Lamb by) {
  uint16_t* __restrict upper = weight.upper + from;
  int16_t* __restrict lower = weight.lower + from;
  const float* __restrict means = weight.states[0] + from;
  alignas(64) float roots[kBlockValues];
  write_roots(weight.states[1] + from, size, roots);
  INDEPENDENT
  for (int64_t i = 0; i < size; ++i) {
    const float value = joined(upper[i], lower[i]);
    const float update = update_of(value, means[i], roots[i], by) * by.ratio;
    split(std::fma(update, by.rate, value), upper[i], lower[i]);
  }
}

}  // namespace
