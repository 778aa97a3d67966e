#include "tensors.hpp"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

namespace cputrain {

std::string message_of(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  return from_torch != nullptr ? from_torch->what_without_backtrace() : error.what();
}

std::string refusal_of(const std::string& description, const std::exception& error) {
  return c10::str("oneCCL refused ", description, ": ", message_of(error));
}

ccl::datatype datatype_of(at::ScalarType type) {
  switch (type) {
    case at::kByte:
    case at::kBool:
      return ccl::datatype::uint8;
    case at::kChar:
      return ccl::datatype::int8;
    case at::kShort:
      return ccl::datatype::int16;
    case at::kUInt16:
      return ccl::datatype::uint16;
    case at::kInt:
      return ccl::datatype::int32;
    case at::kUInt32:
      return ccl::datatype::uint32;
    case at::kLong:
      return ccl::datatype::int64;
    case at::kUInt64:
      return ccl::datatype::uint64;
    case at::kHalf:
      return ccl::datatype::float16;
    case at::kBFloat16:
      return ccl::datatype::bfloat16;
    case at::kFloat:
      return ccl::datatype::float32;
    case at::kDouble:
      return ccl::datatype::float64;
    default:
      refuse("ccl cannot reduce ", type, ": convert the tensor first");
  }
}

void check_one(const Tensors& tensors) {
  CPUTRAIN_REQUIRE(tensors.size() == 1, "ccl takes one tensor per rank, found ", tensors.size());
}

void check_dense(const Tensor& tensor) {
  CPUTRAIN_REQUIRE(
      tensor.device().is_cpu() && tensor.layout() == at::kStrided,
      "ccl takes dense CPU tensors here, found ", tensor.layout(), " on ", tensor.device());
}

void check_dense(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    check_dense(tensor);
  }
}

Tensor bytes_of(const Tensor& contiguous) {
  return at::from_blob(contiguous.data_ptr(), {static_cast<int64_t>(contiguous.nbytes())}, at::kByte);
}

Tensors contiguous(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) {
    made.push_back(tensor.contiguous());
  }
  return made;
}

std::vector<size_t> sizes_of(const Tensors& tensors) {
  std::vector<size_t> sizes;
  for (const auto& tensor : tensors) {
    sizes.push_back(tensor.nbytes());
  }
  return sizes;
}

std::vector<void*> addresses_of(const Tensors& tensors) {
  std::vector<void*> addresses;
  for (const auto& tensor : tensors) {
    addresses.push_back(tensor.data_ptr());
  }
  return addresses;
}

std::string shape_of(const Tensors& tensors) {
  const bool many = tensors.size() > kShown + 1;
  auto text = many ? c10::str(tensors.size(), " tensors: ") : "";
  for (size_t shown = 0; shown < (many ? kShown : tensors.size()); shown++) {
    const auto& tensor = tensors[shown];
    text += shown == 0 ? "" : ", ";
    text += c10::toString(tensor.scalar_type());
    for (int64_t i = 0; i < tensor.dim(); i++) {
      text += (i == 0 ? "[" : ", ") + std::to_string(tensor.size(i));
    }
    text += tensor.dim() == 0 ? "[]" : "]";
  }
  return text + (many ? ", ..." : "");
}

std::function<void()> copier(Tensors targets, Tensors buffers) {
  return [targets = std::move(targets), buffers = std::move(buffers)] {
    for (size_t i = 0; i < targets.size(); i++) {
      if (!targets[i].is_same(buffers[i]) && targets[i].data_ptr() != buffers[i].data_ptr()) {
        targets[i].copy_(buffers[i]);
      }
    }
  };
}

}  // namespace cputrain
