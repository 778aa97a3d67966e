// Collectives that give all ranks the same values: broadcast and all-gather.
#include <algorithm>

#include "backend.hpp"

namespace cputrain {

using c10d::OpType;

WorkPtr CclBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  check_one(tensors);
  check_dense(tensors);
  const auto buffer = tensors[0].contiguous();
  return submit(
      OpType::BROADCAST, tensors, agreement_of(tensors, opts.rootRank), opts.timeout, tensors,
      [=, this] {
        Events events;
        events.push_back(ccl::broadcast(
            buffer.data_ptr(), buffer.nbytes(), ccl::datatype::uint8, static_cast<int>(opts.rootRank), *comm_));
        return events;
      },
      copier(tensors, {buffer}));
}

WorkPtr CclBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  check_one(inputs);
  CPUTRAIN_REQUIRE(outputs.size() == 1, "all_gather takes one list of outputs, found ", outputs.size());
  return gather_lists(OpType::ALLGATHER, outputs, inputs, opts.timeout);
}

WorkPtr CclBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  std::vector<Tensors> by_input(inputs.size());
  for (const auto& of_rank : outputs) {
    CPUTRAIN_REQUIRE(of_rank.size() == inputs.size(), "all_gather_coalesced needs one output per input for each rank");
    for (size_t i = 0; i < inputs.size(); i++) {
      by_input[i].push_back(of_rank[i]);
    }
  }
  return gather_lists(OpType::ALLGATHER_COALESCED, by_input, inputs, opts.timeout);
}

WorkPtr CclBackend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) {
  return gather_into(OpType::_ALLGATHER_BASE, {output}, {input}, opts.timeout);
}

WorkPtr CclBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return gather_into(OpType::COALESCED, outputs, inputs, opts.timeout);
}

// Gathers input i of every rank into outputs[i], which has one tensor per rank.
WorkPtr CclBackend::gather_lists(
    OpType type, const std::vector<Tensors>& outputs, const Tensors& inputs, Milliseconds timeout) {
  check_dense(inputs);
  Tensors sent = contiguous(inputs), targets;
  std::vector<Tensors> received;
  for (size_t i = 0; i < inputs.size(); i++) {
    CPUTRAIN_REQUIRE(
        outputs[i].size() == static_cast<size_t>(size_), "all_gather needs ", size_, " outputs, found ",
        outputs[i].size());
    check_dense(outputs[i]);
    for (const auto& output : outputs[i]) {
      CPUTRAIN_REQUIRE(
          output.scalar_type() == inputs[i].scalar_type(), "all_gather needs inputs and outputs of one type");
    }
    CPUTRAIN_REQUIRE(
        outputs[i][rank_].numel() == inputs[i].numel(), "all_gather: output ", rank_, " holds ",
        outputs[i][rank_].numel(), " values, this rank's input ", inputs[i].numel());
    received.push_back(contiguous(outputs[i]));
    targets.insert(targets.end(), outputs[i].begin(), outputs[i].end());
  }
  // Inputs may have different sizes on different ranks if the outputs on all ranks match them.
  auto agreement = agreement_of(targets);
  for (size_t i = 0; i < inputs.size(); i++) {
    if (std::ranges::any_of(outputs[i], [&](const auto& output) { return output.numel() != inputs[i].numel(); })) {
      agreement.options += " into " + shape_of(outputs[i]);
    }
  }
  return submit(
      type, inputs, std::move(agreement), timeout, targets,
      [=, this] {
        Events events;
        for (size_t i = 0; i < sent.size(); i++) {
          events.push_back(ccl::allgatherv(
              sent[i].data_ptr(), sent[i].nbytes(), addresses_of(received[i]), sizes_of(received[i]),
              ccl::datatype::uint8, *comm_));
        }
        return events;
      },
      [=] {
        for (size_t i = 0; i < sent.size(); i++) {
          copier(outputs[i], received[i])();
        }
      });
}

WorkPtr CclBackend::gather_into(OpType type, const Tensors& outputs, const Tensors& inputs, Milliseconds timeout) {
  check_pairs("all_gather_into_tensor", outputs, inputs);
  const auto sent = contiguous(inputs), received = contiguous(outputs);
  return submit(
      type, inputs, agreement_of(inputs), timeout, outputs,
      [=, this] {
        Events events;
        for (size_t i = 0; i < sent.size(); i++) {
          events.push_back(gather_bytes(sent[i], received[i], std::vector<size_t>(size_, sent[i].nbytes())));
        }
        return events;
      },
      copier(outputs, received));
}

// Checks that there is one whole tensor per part, each with the group's size times the values of its part.
void CclBackend::check_pairs(const char* what, const Tensors& wholes, const Tensors& parts) const {
  check_dense(wholes);
  check_dense(parts);
  CPUTRAIN_REQUIRE(
      !wholes.empty() && wholes.size() == parts.size(), what, ": needs as many outputs as inputs, found ",
      wholes.size(), " and ", parts.size());
  for (size_t i = 0; i < wholes.size(); i++) {
    CPUTRAIN_REQUIRE(
        wholes[i].scalar_type() == parts[i].scalar_type() && wholes[i].numel() == parts[i].numel() * size_, what,
        ": one tensor must have ", size_, " times the values of the other, found ", shape_of({wholes[i]}), " and ",
        shape_of({parts[i]}));
  }
}

}  // namespace cputrain
