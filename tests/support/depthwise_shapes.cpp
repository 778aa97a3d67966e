// Depthwise convolutions of random shapes on memory of exactly their size, for sanitizers.

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "depthwise.hpp"

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
      const size_t reach = layer.dilation[axis] * (layer.kernel[axis] - 1) + 1;
      const size_t padded = sizes[axis] + 2 * layer.padding[axis];
      fits = fits && padded >= reach;
      sizes[axis] = fits ? (padded - reach) / layer.stride[axis] + 1 : 0;
    }
    if (!fits) continue;
    layer.out_height = sizes[0], layer.out_width = sizes[1], layer.threads = 1, layer.bfloat16 = number % 2;
    const float weight = number % 7 == 0 ? INFINITY : 1;
    layer.bfloat16 ? compute<Bfloat16>(layer, weight) : compute<float>(layer, weight);
    ++layers;
  }
  std::printf("%d layers\n", layers);
}
