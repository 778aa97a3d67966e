// Optimizer steps of weights that are split into a bfloat16 and the 16 bits that it lacks of a float32.
//
// One pass over memory, with the bits of torch's fused kernels: either weights are joined block by block, in a core's
// cache, where torch's kernels update them, or (`direct`) loops here do the same operations in registers, which is
// faster. Whether those give the same bits on a CPU, split_optimizers.py finds out when it loads them.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adam_cpu_dispatch.h>
#include <ATen/ops/_fused_adamw_cpu_dispatch.h>
#include <ATen/ops/_fused_sgd_cpu_dispatch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "split_layers.hpp"
#include "split_values.hpp"
#include "values.hpp"

namespace {

constexpr int64_t kVector = 16;  // values: a multiple of torch's vectors, after which its kernels round otherwise

// Joins each block of the weights, calls update(weight, first value, joined weights, gradients), and splits it again.
// Whole vectors are updated by loop(weight, first value, number) if `direct`.
template <typename Update, typename Loop>
void update_in_blocks(const Weight* weights, int64_t count, int direct, const Update& update, const Loop& loop) {
  in_blocks(weights, count, [&](const Weight& weight, int64_t from, int64_t size) {
    if (direct && size % kVector == 0) {
      loop(weight, from, size);
      return;
    }
    alignas(64) float wide[kBlockValues], gradients[kBlockValues];
    join(weight, from, size, wide);
    widen(weight.gradient + from, size, gradients);
    update(weight, from, view(wide, size), view(gradients, size));
    split(wide, size, weight, from);
  });
}

struct Sgd {
  float lr, momentum, undamped, weight_decay, sign;
};

template <bool kDecays, bool kMomentum, bool kNesterov>
void sgd_loop(const Weight& weight, int64_t from, int64_t count, const Sgd by) {
  uint16_t* __restrict upper = weight.upper + from;
  int16_t* __restrict lower = weight.lower + from;
  const uint16_t* __restrict gradient = weight.gradient + from;
  float* __restrict buffer = weight.states[0] + (kMomentum ? from : 0);
  INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const float value = joined(upper[i], lower[i]);
    float change = by.sign * widened(gradient[i]);
    if constexpr (kDecays) change = std::fma(value, by.weight_decay, change);
    if constexpr (kMomentum) {
      const float before = buffer[i] * by.momentum;
      const float sum = std::fma(by.undamped, change, before);
      buffer[i] = sum;
      change = kNesterov ? std::fma(sum, by.momentum, change) : sum;
    }
    split(std::fma(change, -by.lr, value), upper[i], lower[i]);
  }
}

struct Adam {
  float weight_decay, kept, lerp, beta2, square, step_size, correction, eps, sign;
};

template <bool kDecays, bool kDecoupled>
void adam_loop(const Weight& weight, int64_t from, int64_t count, const Adam by) {
  uint16_t* __restrict upper = weight.upper + from;
  int16_t* __restrict lower = weight.lower + from;
  const uint16_t* __restrict gradient = weight.gradient + from;
  float* __restrict means = weight.states[0] + from;
  float* __restrict squares = weight.states[1] + from;
  INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    float value = joined(upper[i], lower[i]);
    float change = by.sign * widened(gradient[i]);
    if constexpr (kDecays && kDecoupled) value *= by.kept;
    if constexpr (kDecays && !kDecoupled) change = std::fma(value, by.weight_decay, change);
    const float mean = means[i] = std::fma(by.lerp, change - means[i], means[i]);
    const float part = by.square * change;
    const float square = squares[i] = std::fma(part, change, squares[i] * by.beta2);
    const float root = std::sqrt(square) / by.correction;
    const float scaled = by.step_size * mean;
    split(value + scaled / (root + by.eps), upper[i], lower[i]);
  }
}

}  // namespace

extern "C" {

// Stochastic gradient descent; states[0] is the momentum, of all weights or none.
void split_sgd(const Weight* weights, int64_t count, int direct, double lr, double momentum, double dampening,
               double weight_decay, int nesterov, int maximize) {
  const Sgd by{float(lr), float(momentum), float(1 - dampening), float(weight_decay), maximize ? -1.0f : 1.0f};
  const auto update = [&](const Weight& weight, int64_t from, at::Tensor wide, at::Tensor gradients) {
    std::vector<at::Tensor> buffers;
    if (momentum != 0) buffers.push_back(view(weight.states[0] + from, wide.numel()));
    at::cpu::_fused_sgd_({wide}, {gradients}, buffers, weight_decay, momentum, lr, dampening, nesterov, maximize,
                         momentum != 0 && weight.is_first != 0);
  };
  const auto loop = [&](const Weight& weight, int64_t from, int64_t size) {
    const auto run = [&](auto decays, auto moves, auto looks_ahead) {
      sgd_loop<decays, moves, looks_ahead>(weight, from, size, by);
    };
    const auto by_momentum = [&](auto decays) {
      if (momentum == 0) return run(decays, std::false_type{}, std::false_type{});
      nesterov ? run(decays, std::true_type{}, std::true_type{}) : run(decays, std::true_type{}, std::false_type{});
    };
    weight_decay != 0 ? by_momentum(std::true_type{}) : by_momentum(std::false_type{});
  };
  // The first step copies gradients to the momentum.
  const bool starts = momentum != 0 && std::any_of(weights, weights + count, [](auto& each) { return each.is_first; });
  update_in_blocks(weights, count, direct && !starts, update, loop);
}

// Adam, or AdamW if `decoupled`: the states are the averages of gradients and of their squares, and with `amsgrad` the
// largest average of squares.
void split_adam(const Weight* weights, int64_t count, int direct, double lr, double beta1, double beta2,
                double weight_decay, double eps, int amsgrad, int maximize, int decoupled) {
  const auto update = [&](const Weight& weight, int64_t from, at::Tensor wide, at::Tensor gradients) {
    const auto state = [&](int i) { return view(weight.states[i] + from, wide.numel()); };
    std::vector<at::Tensor> largest;
    if (amsgrad) largest.push_back(state(2));
    const std::vector<at::Tensor> weight_list{wide}, gradient_list{gradients}, means{state(0)}, squares{state(1)},
        step{view(weight.step, 1)};
    const auto call = [&](const auto& kernel) {
      kernel(weight_list, gradient_list, means, squares, largest, step, lr, beta1, beta2, weight_decay, eps, amsgrad,
             maximize);
    };
    if (decoupled) {
      call([](const auto&... values) { at::cpu::_fused_adamw_(values...); });
    } else {
      call([](const auto&... values) { at::cpu::_fused_adam_(values...); });
    }
  };
  const auto loop = [&](const Weight& weight, int64_t from, int64_t size) {
    const double step = *weight.step, correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
    const Adam by{float(weight_decay),
                  float(1 - lr * weight_decay),
                  float(1 - beta1),
                  float(beta2),
                  float(1 - beta2),
                  float(-lr / correction1),
                  float(std::sqrt(correction2)),
                  float(eps),
                  maximize ? -1.0f : 1.0f};
    const auto run = [&](auto decays, auto is_decoupled) {
      adam_loop<decays, is_decoupled>(weight, from, size, by);
    };
    if (weight_decay == 0) return run(std::false_type{}, std::false_type{});
    decoupled ? run(std::true_type{}, std::true_type{}) : run(std::true_type{}, std::false_type{});
  };
  // Where 1 - beta1 is 0.5 or more, torch interpolates from the other end.
  update_in_blocks(weights, count, direct && !amsgrad && 1 - beta1 < 0.5, update, loop);
}

// Writes the float32 weights to states[0], and their gradients to states[1].
void split_read(const Weight* weights, int64_t count) {
  in_blocks(weights, count, [](const Weight& weight, int64_t from, int64_t size) {
    join(weight, from, size, weight.states[0] + from);
    widen(weight.gradient + from, size, weight.states[1] + from);
  });
}

// Replaces the weights by the float32 ones at states[0].
void split_write(const Weight* weights, int64_t count) {
  in_blocks(weights, count, [](const Weight& weight, int64_t from, int64_t size) {
    split(weight.states[0] + from, size, weight, from);
  });
}

// Writes the norms of each weight (unless `of_weights`, twice the latter) and of its gradient. `lanes` and `fused` are
// how torch adds squares (split_layers.hpp).
void split_norms(const Weight* weights, int64_t count, int lanes, int fused, int of_weights, float* norms) {
  const auto write = fused ? (lanes == 16 ? write_norms<16, true> : write_norms<8, true>)
                           : (lanes == 16 ? write_norms<16, false> : write_norms<8, false>);
  in_layers(weights, count, [&](const Weight& weight, int64_t i) { write(weight, of_weights, norms + 2 * i); });
}

// LAMB's first pass: averages of gradients (states[0]) and of their squares, and the norms of weight and update.
// `by` has the options of each weight.
void split_lamb_averages(const Weight* weights, int64_t count, int lanes, int fused, const Lamb* by, float* norms) {
  const auto update = fused ? (lanes == 16 ? average<16, true> : average<8, true>)
                            : (lanes == 16 ? average<16, false> : average<8, false>);
  in_layers(weights, count, [&](const Weight& weight, int64_t i) { update(weight, by[i], norms + 2 * i); });
}

// LAMB's second pass: the updates, times `ratio` and `rate` of each weight.
void split_lamb_update(const Weight* weights, int64_t count, const Lamb* by) {
  in_blocks(weights, count, [&](const Weight& weight, int64_t from, int64_t size) {
    update_by(weight, from, size, by[&weight - weights]);
  });
}
}
