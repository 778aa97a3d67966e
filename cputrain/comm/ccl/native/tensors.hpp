// Types, addresses and sizes of tensors for oneCCL, with checks; and error messages.
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

// Throws an error of one line, without the C++ stack that TORCH_CHECK appends.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::runtime_error(c10::str(parts...));
}

// Returns an exception's message, without the C++ stack in PyTorch's exceptions.
std::string message_of(const std::exception& error);

// Returns the error message for an operation that oneCCL refuses to start.
std::string refusal_of(const std::string& description, const std::exception& error);

// Returns oneCCL's type for reductions; throws if oneCCL cannot reduce the type.
ccl::datatype datatype_of(at::ScalarType type);

void check_one(const Tensors& tensors);
void check_dense(const Tensor& tensor);
void check_dense(const Tensors& tensors);

// Returns a contiguous tensor's bytes as a tensor, to move data of any type.
Tensor bytes_of(const Tensor& contiguous);

Tensors contiguous(const Tensors& tensors);
std::vector<size_t> sizes_of(const Tensors& tensors);
std::vector<void*> addresses_of(const Tensors& tensors);

// Describes types and shapes of tensors for messages; of many tensors only the first kShown.
constexpr size_t kShown = 3;
std::string shape_of(const Tensors& tensors);

// Returns a function that copies the buffers to the caller's tensors, unless they are the same memory.
std::function<void()> copier(Tensors targets, Tensors buffers);

}  // namespace cputrain

// Throws unless the condition holds. The parts of the message are evaluated only in that case.
#define CPUTRAIN_REQUIRE(condition, ...)  \
  do {                                    \
    if (!(condition)) {                   \
      ::cputrain::refuse(__VA_ARGS__);    \
    }                                     \
  } while (false)
