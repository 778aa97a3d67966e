#include "agreement.hpp"

#include "reductions.hpp"

namespace cputrain {

Agreement agreement_of(const Tensors& tensors) {
  Agreement made;
  for (const auto& tensor : tensors) {
    made.add(static_cast<uint64_t>(tensor.scalar_type()));
    made.add(static_cast<uint64_t>(tensor.numel()));
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

void add_operator(Agreement& agreement, c10d::ReduceOp::RedOpType op) {
  agreement.add(static_cast<uint64_t>(op));
  agreement.options += op == c10d::ReduceOp::SUM ? "" : c10::str(" by ", name_of(op));
}

void add_root(Agreement& agreement, int64_t root) {
  agreement.add(static_cast<uint64_t>(root));
  agreement.options += root == 0 ? "" : c10::str(" of root ", root);
}

}  // namespace cputrain
