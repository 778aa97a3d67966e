#include "bfloat16.hpp"

namespace cputrain {

__attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3"))) void add_bfloat16(
    const uint16_t* in, uint16_t* inout, size_t count) {
  for (size_t i = 0; i < count; i++) {
    inout[i] = rounded(widened(in[i]) + widened(inout[i]));
  }
}

__attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3"))) void multiply_bfloat16(
    const uint16_t* in, uint16_t* inout, size_t count) {
  for (size_t i = 0; i < count; i++) {
    inout[i] = rounded(widened(in[i]) * widened(inout[i]));
  }
}

}  // namespace cputrain
