// What the kernels below torch's operators compute, on plain memory. Their code is compiled without torch's headers
// (operator_kernels.cpp), the operators (operators.cpp) without theirs. Images are channels-last, float32 or bfloat16.

#pragma once

#include <cstddef>
#include <cstdint>

// One depthwise layer: sizes of its input, output and kernel, stride, padding and dilation (down, then across), and
// threads.
struct DepthwiseConvolution {
  size_t images, height, width, channels, out_height, out_width;
  size_t kernel[2], stride[2], padding[2], dilation[2];
  int bfloat16, threads;
};

// Weights are (kernel height, kernel width, channels), float32. `bias` may be null.
void depthwise_outputs(const DepthwiseConvolution& layer, const void* x, const float* weights, const float* bias,
                       void* out);
void depthwise_input_gradients(const DepthwiseConvolution& layer, const void* g, const float* weights, void* out);
void depthwise_weight_gradients(const DepthwiseConvolution& layer, const void* x, const void* g, float* out);

// Values of a batch-norm layer: rows = images x height x width.
struct NormRows {
  size_t rows, channels;
  int bfloat16, threads;
};

// Parameters of a layer, float32; weight and bias may be null for 1 and 0.
struct NormParameters {
  const float *weight, *bias;
};

// Writes the normalized values to y, the mean and 1 / sqrt(variance + eps) of each channel, and moves the running
// statistics, which may be null.
void batch_norm_outputs(const NormRows& values, const NormParameters& parameters, double eps, double momentum,
                        const void* x, void* y, float* mean, float* inverse, float* running_mean,
                        float* running_variance);

// Writes the gradients of inputs, weight and bias, each of which may be null.
void batch_norm_gradients(const NormRows& values, const NormParameters& parameters, const float* mean,
                          const float* inverse, const void* g, const void* x, void* dx, float* dweight, float* dbias);

// One grouped layer with as many outputs as inputs.
struct GroupedConvolution {
  size_t images, height, width, channels, out_height, out_width, groups;
  size_t kernel[2], stride[2], padding[2], dilation[2];
  int threads;
};

// Returns whether a group's number of channels is covered: 8, 16 or 24, or 4 of an even number of
// groups, on AVX2.
bool grouped_covers(size_t channels, size_t groups);

// Returns how many groups a block of channels has. Weights are (block, tap, input channel of the group, channel of the
// block), float32. `bias` may be null.
size_t grouped_block(size_t channels);
void grouped_convolution(const GroupedConvolution& layer, const float* x, const float* weights, const float* bias,
                         float* out);
void grouped_weight_gradients(const GroupedConvolution& layer, const float* x, const float* g, float* out);

// Returns whether all values are finite: zeros around an image are multiplied by them.
bool are_finite(const float* values, size_t count);
bool are_finite_halves(const void* values, size_t count, int threads);  // bfloat16

// One layer, its bfloat16 images (N, H, W, C): `patches` writes what each output reads, (N x out height x out width,
// kernel height, kernel width, C), zeros outside the image.
struct Patches {
  size_t images, height, width, channels, out_height, out_width;
  size_t kernel[2], stride[2], padding[2], dilation[2];
  int threads;
};
void patches(const Patches& layer, const void* x, void* out);

// Writes a matrix of 16-bit values, `step` values from row to row, as (columns, rows).
void transpose_halves(const void* from, size_t rows, size_t columns, size_t step, int threads, void* to);

// Writes rows of `columns` bfloat16 values as pairs of rows, (rows / 2, columns, 2), and their transpose as pairs of
// its rows, (columns / 2, rows, 2).
void pair_rows(const void* from, size_t rows, size_t columns, size_t step, void* to);
void pair_columns(const void* from, size_t rows, size_t columns, size_t step, void* to);

// A block of attention's scores, float32: queries and, of the matrices that are written, rows; keys and values from row
// to row; the first query's number if later keys are hidden from it, else `keys`; and the scores' factor.
struct Scores {
  int64_t queries, rows, keys, step, first;
  float scale;
};

// Writes the probabilities and the scores' gradients in bfloat16, zero beyond queries and keys, from the products of
// queries and keys, those of the outputs' gradients and values, and rows of `size` outputs and their gradients.
void softmax_gradients(const Scores& block, const float* scores, const float* products, const float* logsumexp,
                       int64_t logsumexp_step, const void* grad, int64_t grad_step, const void* out, int64_t out_step,
                       int64_t size, void* probabilities, void* score_gradients);

// Rounds rows of `columns` values to bfloat16.
void narrow_rows(const float* from, size_t rows, size_t columns, void* to, size_t step);
