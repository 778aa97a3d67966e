#include "agreement.hpp"

#include "reductions.hpp"

namespace cputrain {

Agreement agreement_of(const Tensors& tensors) {
  Agreement made;
  for (const auto& tensor : tensors) {
    made.add(static_cast<uint64_t>(tensor.scalar_type()));
    made.add(static_cast<uint64_t>(tensor.numel()));
    made.tensors.push_back(static_cast<uint64_t>(tensor.scalar_type()) << kTypeShift | static_cast<uint64_t>(tensor.numel()));
  }
  return made;
}

Agreement agreement_of(const Tensors& tensors, c10d::ReduceOp::RedOpType op) {
  auto made = agreement_of(tensors);
  add_operator(made, op);
  return made;
}

Agreement agreement_of(const Tensors& tensors, int64_t root) {
  auto made = agreement_of(tensors);
  add_root(made, root);
  return made;
}

uint64_t Agreement::balance(int rank, uint64_t number) const {
  const auto sent = [number](uint64_t from, uint64_t to, uint64_t bytes) {
    return mixed(mixed(mixed(mixed(0, number + 1), from + 1), to + 1), bytes + 1);
  };
  uint64_t sum = 0;
  for (size_t other = 0; other < give.size(); other++) {
    sum += sent(rank, other, give[other]) - sent(other, rank, receive[other]);
  }
  return sum;
}

void add_operator(Agreement& agreement, c10d::ReduceOp::RedOpType op) {
  agreement.add(static_cast<uint64_t>(op));
  agreement.options += op == c10d::ReduceOp::SUM ? "" : c10::str(" by ", name_of(op));
}

void add_root(Agreement& agreement, int64_t root) {
  agreement.add(static_cast<uint64_t>(root));
  agreement.options += root == 0 ? "" : c10::str(" of root ", root);
}

}  // namespace cputrain
