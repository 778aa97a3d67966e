// Tensors as oneCCL sees them: types, addresses and sizes, checked before they are handed over.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>
#include <oneapi/ccl.hpp>

namespace cputrain {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// An error of one line in Python, without the C++ stack that TORCH_CHECK appends.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::runtime_error(c10::str(parts...));
}

// What an exception says, without the C++ stack of PyTorch's own.
std::string message_of(const std::exception& error);

// What is said of an operation that oneCCL does not start.
std::string refusal_of(const std::string& description, const std::exception& error);

// oneCCL's type for reductions; refuses types that it cannot reduce.
ccl::datatype datatype_of(at::ScalarType type);

void check_one(const Tensors& tensors);
void check_dense(const Tensor& tensor);
void check_dense(const Tensors& tensors);

// All of a contiguous tensor's bytes; moving them needs no knowledge of its type.
Tensor bytes_of(const Tensor& contiguous);

Tensors contiguous(const Tensors& tensors);
std::vector<size_t> sizes_of(const Tensors& tensors);
std::vector<void*> addresses_of(const Tensors& tensors);

// The types and shapes of tensors for people, of many the first kShown.
constexpr size_t kShown = 3;
std::string shape_of(const Tensors& tensors);

// Returns a function that copies the buffers to the caller's tensors, unless they are the same memory.
std::function<void()> copier(Tensors targets, Tensors buffers);

}  // namespace cputrain

// The parts of the message are evaluated only where the condition does not hold.
#define CPUTRAIN_REQUIRE(condition, ...)  \
  do {                                    \
    if (!(condition)) {                   \
      ::cputrain::refuse(__VA_ARGS__);    \
    }                                     \
  } while (false)
