// Reductions that oneCCL lacks (bitwise ones, sums of sparse tensors): all ranks' values are gathered and reduced here.
#include <ATen/Functions.h>

#include "backend.hpp"

namespace cputrain {

using c10d::OpType;
using c10d::ReduceOp;

ccl::event CclBackend::gather_bytes(
    const Tensor& sent, const Tensor& received, const std::vector<size_t>& bytes) const {
  return ccl::allgatherv(
      sent.data_ptr(), sent.nbytes(), received.data_ptr(), bytes, ccl::datatype::uint8, *comm_);
}

namespace {

// Returns the bitwise combination of the rows of a tensor.
Tensor combined(const Tensor& rows, RedOpType op) {
  auto result = rows[0];
  for (int64_t rank = 1; rank < rows.size(0); rank++) {
    const auto other = rows[rank];
    result = op == ReduceOp::BAND ? result.bitwise_and(other)
             : op == ReduceOp::BOR ? result.bitwise_or(other)
                                   : result.bitwise_xor(other);
  }
  return result;
}

void check_bits(const Tensor& tensor) {
  CPUTRAIN_REQUIRE(at::isIntegralType(tensor.scalar_type(), true), "ccl reduces only integers and booleans bitwise");
}

}  // namespace

// Writes the result to the tensors of rank `root`, or of all ranks without `root`.
WorkPtr CclBackend::reduce_bits(
    OpType type, const Tensors& tensors, RedOpType op, Milliseconds timeout, std::optional<int64_t> root) {
  const bool receives = root.value_or(rank_) == rank_;
  auto agreement = agreement_of(tensors, op);
  if (root) {
    add_root(agreement, *root);
  }
  Tensors sent, gathered;
  for (const auto& tensor : tensors) {
    check_bits(tensor);
    sent.push_back(tensor.contiguous());
    gathered.push_back(at::empty({size_, tensor.numel()}, tensor.options()));
  }
  return submit(
      type, tensors, std::move(agreement), timeout, tensors,
      [=, this] {
        Events events;
        for (size_t i = 0; i < sent.size(); i++) {
          events.push_back(gather_bytes(sent[i], gathered[i], std::vector<size_t>(size_, sent[i].nbytes())));
        }
        return events;
      },
      [=] {  // without `this`: the group may be destroyed while the operation is in flight
        for (size_t i = 0; receives && i < tensors.size(); i++) {
          tensors[i].copy_(combined(gathered[i], op).view(tensors[i].sizes()));
        }
      });
}

WorkPtr CclBackend::scatter_bits(
    OpType type, const Tensors& outputs, const Tensors& inputs, RedOpType op, Milliseconds timeout) {
  Tensors sent, received;
  for (const auto& input : inputs) {
    check_bits(input);
    sent.push_back(input.contiguous());
    received.push_back(at::empty({size_, input.numel() / size_}, input.options()));
  }
  return submit(
      type, inputs, agreement_of(inputs, op), timeout, outputs,
      [=, this] {
        Events events;
        for (size_t i = 0; i < sent.size(); i++) {
          const std::vector<size_t> bytes(size_, sent[i].nbytes() / size_);
          events.push_back(ccl::alltoallv(
              sent[i].data_ptr(), bytes, received[i].data_ptr(), bytes, ccl::datatype::uint8, *comm_));
        }
        return events;
      },
      [=] {
        for (size_t i = 0; i < outputs.size(); i++) {
          outputs[i].copy_(combined(received[i], op).view(outputs[i].sizes()));
        }
      });
}

// The call blocks while the ranks exchange their numbers of entries, which must be known to gather the entries.
WorkPtr CclBackend::reduce_sparse(const Tensor& tensor, RedOpType op, Milliseconds timeout) {
  CPUTRAIN_REQUIRE(op == ReduceOp::SUM, "ccl reduces sparse tensors by sum only, found ", name_of(op));
  CPUTRAIN_REQUIRE(tensor.device().is_cpu(), "ccl takes CPU tensors, found one on ", tensor.device());
  const auto entries = tensor.detach().coalesce();
  const auto indices = entries._indices().t().contiguous();  // entries x sparse dimensions
  const auto values = entries._values().contiguous();
  const auto mine = at::full({1}, entries._nnz(), at::kLong);
  const auto counts = at::empty({size_}, at::kLong);
  submit(
      OpType::_ALLREDUCE_SPARSE, {tensor}, agreement_of({tensor}), timeout, {},
      [=, this] {
        Events events;
        events.push_back(gather_bytes(mine, counts, std::vector<size_t>(size_, sizeof(int64_t))));
        return events;
      },
      [] {})
      ->wait();
  const auto total = counts.sum().item<int64_t>();
  auto shape = values.sizes().vec();
  shape[0] = total;
  const auto all_indices = at::empty({total, indices.size(1)}, indices.options());
  const auto all_values = at::empty(shape, values.options());
  const auto bytes_by_rank = [&](const Tensor& all) {
    const auto one = total == 0 ? 0 : all.nbytes() / total;
    std::vector<size_t> bytes;
    for (int rank = 0; rank < size_; rank++) {
      bytes.push_back(one * counts.const_data_ptr<int64_t>()[rank]);
    }
    return bytes;
  };
  return submit(
      OpType::_ALLREDUCE_SPARSE, {values}, agreement_of({all_indices, all_values}), timeout, {tensor},
      [=, this, index_bytes = bytes_by_rank(all_indices), value_bytes = bytes_by_rank(all_values)] {
        Events events;
        events.push_back(gather_bytes(indices, all_indices, index_bytes));
        events.push_back(gather_bytes(values, all_values, value_bytes));
        return events;
      },
      [=] {
        tensor.copy_(at::sparse_coo_tensor(all_indices.t(), all_values, tensor.sizes()).coalesce());
      });
}

}  // namespace cputrain
