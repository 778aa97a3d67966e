// Kernels below torch's CPU operators: what they do not cover goes on to torch's own.

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <vector>

#include "convolution_operators.hpp"
#include "norm_operators.hpp"
#include "product_operators.hpp"

namespace {

// The kernels, in the order of their bits in set_kernels.
Kernel* const kKernels[] = {&depthwise_kernel, &grouped_kernel, &pointwise_kernel, &batch_norm_kernel,
                            &float32_kernel,   &amx_kernel,     &unwritten_kernel};

template <auto function>
void add(torch::Library& library, const char* name) {
  library.impl(name, TORCH_FN(function));
}

// An operator of torch, and the kernels that are below it.
struct Operator {
  const char* name;
  void (*add_to)(torch::Library&, const char* name);
  std::vector<const Kernel*> kernels;
};

const std::vector<const Kernel*> kConvolutions{&depthwise_kernel, &grouped_kernel, &pointwise_kernel,
                                               &float32_kernel,   &amx_kernel,     &unwritten_kernel};

const Operator kOperators[] = {
    {"convolution", add<convolution>, kConvolutions},
    {"convolution_backward", add<convolution_backward>, kConvolutions},
    {"native_batch_norm", add<batch_norm>, {&batch_norm_kernel}},
    {"native_batch_norm_backward", add<batch_norm_backward>, {&batch_norm_kernel}},
    {"mm", add<mm>, {&float32_kernel, &amx_kernel}},
    {"bmm", add<bmm>, {&float32_kernel}},
    {"addmm", add<addmm>, {&float32_kernel}},
    {"baddbmm", add<baddbmm>, {&float32_kernel}},
    {"_scaled_dot_product_flash_attention_for_cpu_backward", add<attention_backward>, {&float32_kernel, &amx_kernel}},
};

class Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}  // torch warns that its own kernels are replaced, which is asked for
};

std::unique_ptr<torch::Library> registered;

}  // namespace

extern "C" {

// Returns the name of a kernel, or null after the last one.
const char* kernel_name(size_t number) { return number < std::size(kKernels) ? kKernels[number]->name : nullptr; }

// Returns how many calls a kernel has computed in this process.
int64_t kernel_calls(size_t number) { return kKernels[number]->calls; }

// Registers the kernels whose bits are set below torch's operators in this process, and takes all others away.
void set_kernels(uint64_t bits) {
  registered.reset();
  for (size_t number = 0; number < std::size(kKernels); ++number) kKernels[number]->on = (bits >> number & 1) != 0;
  if (bits == 0) return;
  static Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const auto key = c10::DispatchKey::CPU;
  registered = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  for (const Operator& operator_ : kOperators) {
    if (std::ranges::any_of(operator_.kernels, [](const Kernel* kernel) { return kernel->on.load(); })) {
      operator_.add_to(*registered, operator_.name);
    }
  }
}
}
