// Depthwise and grouped convolutions and batch-norm of random shapes on memory of exactly their size, for sanitizers.

#include <array>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "operator_kernels.cpp"

namespace {

std::mt19937 random_number(1);

size_t pick(size_t from, size_t to) { return from + random_number() % (to - from + 1); }

template <typename Value>
void compute(const Layer& layer, float weight) {
  const size_t inputs = layer.images * layer.height * layer.width * layer.channels;
  const size_t outputs = layer.images * layer.out_height * layer.out_width * layer.channels;
  const size_t weights = layer.kernel[0] * layer.kernel[1] * layer.channels;
  const std::vector<float> w(weights, weight), bias(layer.channels, 1);
  const std::vector<Value> x(inputs, 1);
  std::vector<Value> y(outputs), input(inputs);
  std::vector<float> gradient(weights);
  forward(layer, x.data(), w.data(), bias.data(), y.data());
  input_gradient(layer, y.data(), w.data(), input.data());
  weight_gradient(layer, x.data(), y.data(), gradient.data());
}

void compute_grouped() {
  GroupedConvolution l{};
  const size_t each = std::array<size_t, 4>{4, 8, 16, 24}[pick(0, 3)];
  l.groups = 2 * pick(1, 2), l.channels = l.groups * each;
  if (!grouped_covers(l.channels, l.groups)) return;
  l.images = pick(1, 3), l.threads = 1;
  l.height = pick(1, 14), l.width = pick(1, 14);
  size_t sizes[2] = {l.height, l.width};
  for (int axis = 0; axis < 2; ++axis) {
    l.kernel[axis] = pick(1, 4), l.stride[axis] = pick(1, 3), l.padding[axis] = pick(0, 3);
    l.dilation[axis] = pick(1, 2);
    const size_t reach = l.dilation[axis] * (l.kernel[axis] - 1) + 1, padded = sizes[axis] + 2 * l.padding[axis];
    if (padded < reach) return;
    sizes[axis] = (padded - reach) / l.stride[axis] + 1;
  }
  l.out_height = sizes[0], l.out_width = sizes[1];
  const std::vector<float> x(l.images * l.height * l.width * l.channels, 1), bias(l.channels, 1);
  const std::vector<float> weights(l.kernel[0] * l.kernel[1] * l.channels * each, 1);
  std::vector<float> y(l.images * l.out_height * l.out_width * l.channels), gradient(weights.size());
  grouped_forward(l, x.data(), weights.data(), bias.data(), y.data());
  grouped_weight_gradient(l, x.data(), y.data(), gradient.data());
}

template <typename Value>
void compute_norm() {
  const NormRows rows{pick(1, 300), pick(1, 300), 0, 1};
  const std::vector<Value> x(rows.rows * rows.channels, 1);
  std::vector<Value> y(x.size()), dx(x.size());
  const std::vector<float> weight(rows.channels, 1);
  std::vector<float> mean(rows.channels), inverse(rows.channels), running(rows.channels), variance(rows.channels);
  const NormParameters parameters{weight.data(), weight.data()};
  batch_norm_forward(rows, parameters, 1e-5, 0.1, x.data(), y.data(), mean.data(), inverse.data(), running.data(),
                     variance.data());
  batch_norm_backward(rows, parameters, mean.data(), inverse.data(), y.data(), x.data(), dx.data(), running.data(),
                      variance.data());
}

void compute_patches() {
  Patches l{};
  l.images = pick(1, 3), l.channels = pick(1, 40), l.height = pick(1, 9), l.width = pick(1, 9), l.threads = 1;
  size_t sizes[2] = {l.height, l.width};
  for (int axis = 0; axis < 2; ++axis) {
    l.kernel[axis] = pick(1, 4), l.stride[axis] = pick(1, 3), l.padding[axis] = pick(0, 3);
    l.dilation[axis] = pick(1, 2);
    const size_t reach = l.dilation[axis] * (l.kernel[axis] - 1) + 1, padded = sizes[axis] + 2 * l.padding[axis];
    if (padded < reach) return;
    sizes[axis] = (padded - reach) / l.stride[axis] + 1;
  }
  l.out_height = sizes[0], l.out_width = sizes[1];
  const std::vector<Bfloat16> x(l.images * l.height * l.width * l.channels, 1);
  std::vector<Bfloat16> read(l.images * l.out_height * l.out_width * l.kernel[0] * l.kernel[1] * l.channels);
  patches(l, x.data(), read.data());
}

void compute_attention() {
  const size_t queries = pick(1, 70), keys = pick(1, 70), size = 2 * pick(1, 40), gap = pick(0, 3);
  const size_t rows = (queries + 1) / 2 * 2, step = (keys + 1) / 2 * 2;
  const std::vector<Bfloat16> heads((std::max(queries, keys) - 1) * (size + gap) + size, 1);
  std::vector<uint32_t> pairs(step / 2 * size), columns(size / 2 * keys);
  pair_rows(heads.data(), keys, size, size + gap, pairs.data());
  pair_columns(heads.data(), keys, size, size + gap, columns.data());
  const std::vector<float> scores(queries * keys, 1), sums(queries, 2);
  std::vector<Bfloat16> probabilities(rows * step), gradients(rows * step), turned(keys * rows);
  const Scores block{static_cast<int64_t>(queries), static_cast<int64_t>(rows), static_cast<int64_t>(keys),
                     static_cast<int64_t>(step), static_cast<int64_t>(pick(0, keys)), 1};
  softmax_gradients(block, scores.data(), scores.data(), sums.data(), 1, heads.data(), size + gap, heads.data(),
                    size + gap, size, probabilities.data(), gradients.data());
  transpose_halves(gradients.data(), rows, keys, step, 1, turned.data());
}

}  // namespace

int main() {
  int layers = 0;
  for (int number = 0; number < 3000; ++number) {
    Layer layer{};
    layer.images = pick(1, 3), layer.channels = pick(1, 40), layer.height = pick(1, 12), layer.width = pick(1, 12);
    bool fits = true;
    size_t sizes[2] = {layer.height, layer.width};
    for (int axis = 0; axis < 2; ++axis) {
      layer.kernel[axis] = pick(1, 9), layer.stride[axis] = pick(1, 3), layer.padding[axis] = pick(0, 4);
      layer.dilation[axis] = pick(1, 3);
      if (number % 4 == 0) layer.kernel[axis] = 3, layer.dilation[axis] = 1, layer.stride[axis] = 1 + number % 8 / 4;
      const size_t reach = layer.dilation[axis] * (layer.kernel[axis] - 1) + 1;
      const size_t padded = sizes[axis] + 2 * layer.padding[axis];
      fits = fits && padded >= reach;
      sizes[axis] = fits ? (padded - reach) / layer.stride[axis] + 1 : 0;
    }
    if (number % 3 == 0) compute_grouped();
    if (number % 3 == 1) compute_patches();
    if (number % 3 == 2) compute_attention();
    if (number % 10 == 0) number % 20 == 0 ? compute_norm<float>() : compute_norm<Bfloat16>();
    if (!fits) continue;
    layer.out_height = sizes[0], layer.out_width = sizes[1], layer.threads = 1, layer.bfloat16 = number % 2;
    const float weight = number % 7 == 0 ? INFINITY : 1;
    layer.bfloat16 ? compute<Bfloat16>(layer, weight) : compute<float>(layer, weight);
    ++layers;
  }
  std::printf("%d layers\n", layers);
}
