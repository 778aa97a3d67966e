// What has to be the same on all ranks that call a collective.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "tensors.hpp"

namespace cputrain {

constexpr int kTypeShift = 56;

inline uint64_t mixed(uint64_t digest, uint64_t value) {
  digest = (digest ^ value) * 0x9e3779b97f4a7c15;
  return digest ^ (digest >> 29);
}

// Two ranks whose agreements have the same digest, and whose bytes for each other match, are in the same collective.
struct Agreement {
  uint64_t digest = 0;
  std::string options;  // for people: what the shapes do not show
  std::vector<uint64_t> tensors;  // of each its type, in the upper eight bits, and number of values
  // Bytes for and from each rank, where these are not the same for all: oneCCL believes each rank's own numbers.
  std::vector<size_t> give, receive;

  void add(uint64_t value) { digest = mixed(digest, value + 1); }

  // Of a rank in the collective of a number: over all ranks of a group, these add up to 0 where the bytes match.
  uint64_t balance(int rank, uint64_t number) const;
};

// Of tensors whose types and sizes are the same on all ranks.
Agreement agreement_of(const Tensors& tensors);
Agreement agreement_of(const Tensors& tensors, c10d::ReduceOp::RedOpType op);
Agreement agreement_of(const Tensors& tensors, int64_t root);

// Says for people, and compares, the operator or the root of a collective.
void add_operator(Agreement& agreement, c10d::ReduceOp::RedOpType op);
void add_root(Agreement& agreement, int64_t root);

}  // namespace cputrain
