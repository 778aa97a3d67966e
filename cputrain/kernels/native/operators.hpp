// Kernels below torch's operators: their records, and what they share.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <string>
#include <tuple>

namespace {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// A kernel, which Python switches on, counts and describes by its name (operators_table.py).
struct Kernel {
  const char* name;
  std::atomic<bool> on{false};
  std::atomic<int64_t> calls{0};

  explicit Kernel(const char* title) : name(title) {}
};

// A call that a kernel computes: counted, and an event of torch's profilers and of recorder.cpp as long as this lives.
class Call {
 public:
  explicit Call(Kernel& kernel) : event_(at::RecordScope::FUNCTION) {
    ++kernel.calls;
    if (event_.isActive()) event_.before(std::string("cputrain: ") + kernel.name);
  }

 private:
  at::RecordFunction event_;
};

// Whether torch computes bfloat16 by oneDNN on this CPU.
bool has_avx512() {
#ifdef __x86_64__
  static const bool found = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512dq");
  return found;
#else
  return true;  // torch asks the CPU for its own instructions
#endif
}

// Whether oneDNN multiplies bfloat16 matrices by AMX.
bool has_amx() {
  static const bool found = at::native::cpublas::could_pack(at::kBFloat16);
  return found;
}

bool is_dense(const Tensor& value) { return value.layout() == at::kStrided && value.device().is_cpu(); }

// Whether torch would compute this bfloat16 value without oneDNN.
bool is_slow(const Tensor& value) {
  return value.scalar_type() == at::kBFloat16 && is_dense(value) && !has_avx512() && value.numel() > 0;
}

Tensor wide(const Tensor& value) { return value.defined() ? value.to(at::kFloat) : value; }
Tensor narrow(const Tensor& value) { return value.defined() ? value.to(at::kBFloat16) : value; }

// The gradient of a bias, for which oneDNN would compute that of the weights as well.
Tensor channel_sums(const Tensor& grad) {
  const std::array<int64_t, 4> axes{0, 2, 3, 4};
  return grad.to(at::kFloat).sum(at::IntArrayRef(axes.data(), grad.dim() - 1)).to(grad.scalar_type());
}

std::optional<Tensor> wide(const std::optional<Tensor>& value) {
  return value.has_value() ? std::optional<Tensor>(wide(*value)) : value;
}

}  // namespace
