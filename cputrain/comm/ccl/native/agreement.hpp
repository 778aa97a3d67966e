// Parameters of a collective that must agree on all ranks.
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

// Two ranks are in the same collective if their digests are equal and the bytes they send to each other match.
struct Agreement {
  uint64_t digest = 0;
  std::string options;  // text for messages: options that the shapes do not show
  std::vector<uint64_t> tensors;  // each tensor's type, in the upper eight bits, and number of values
  // Bytes for and from each rank, if they differ between ranks: oneCCL does not check them against each other.
  std::vector<size_t> give, receive;

  void add(uint64_t value) { digest = mixed(digest, value + 1); }

  // A rank's balance in collective `number`; the balances of all ranks of a group sum to 0 if the bytes match.
  uint64_t balance(int rank, uint64_t number) const;
};

// Agreements on tensors whose types and sizes are the same on all ranks.
Agreement agreement_of(const Tensors& tensors);
Agreement agreement_of(const Tensors& tensors, c10d::ReduceOp::RedOpType op);
Agreement agreement_of(const Tensors& tensors, int64_t root);

// Adds the operator or the root of a collective to the digest and to the text.
void add_operator(Agreement& agreement, c10d::ReduceOp::RedOpType op);
void add_root(Agreement& agreement, int64_t root);

}  // namespace cputrain
