// Collectives that give each rank different values, and point-to-point messages.
#include <numeric>

#include <ATen/Functions.h>

#include "backend.hpp"

namespace cputrain {

using c10d::OpType;

namespace {

Tensors sent_or_received(const Tensors& inputs, const Tensors& outputs) {
  Tensors described;
  for (const auto* tensors : {&inputs, &outputs}) {
    for (const auto& tensor : *tensors) {
      if (tensor.defined() && (tensors == &inputs || described.empty())) {
        described.push_back(tensor);
      }
    }
  }
  return described;
}

// Checks that a root's tensors for or from all ranks have the size and type of `own`.
void check_like(const char* what, const Tensors& tensors, const Tensor& own) {
  for (const auto& tensor : tensors) {
    CPUTRAIN_REQUIRE(
        tensor.numel() == own.numel() && tensor.scalar_type() == own.scalar_type(), what,
        " needs tensors of one size and type, found ", shape_of(tensors), " for ", shape_of({own}));
  }
}

}  // namespace

WorkPtr CclBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  check_one(inputs);
  const bool receives = rank_ == opts.rootRank;
  CPUTRAIN_REQUIRE(
      receives ? outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(size_) : outputs.empty(),
      "gather needs a list of ", size_, " output tensors on the root and none on other ranks");
  if (receives) {
    check_like("gather", outputs[0], inputs[0]);
  }
  return exchange(
      OpType::GATHER, agreement_of(inputs, opts.rootRank), receives ? outputs[0] : Tensors(size_),
      only(inputs[0], opts.rootRank), opts.timeout);
}

WorkPtr CclBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  check_one(outputs);
  const bool sends = rank_ == opts.rootRank;
  CPUTRAIN_REQUIRE(
      sends ? inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(size_) : inputs.empty(),
      "scatter needs a list of ", size_, " input tensors on the root and none on other ranks");
  if (sends) {
    check_like("scatter", inputs[0], outputs[0]);
  }
  return exchange(
      OpType::SCATTER, agreement_of(outputs, opts.rootRank), only(outputs[0], opts.rootRank),
      sends ? inputs[0] : Tensors(size_), opts.timeout);
}

WorkPtr CclBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  CPUTRAIN_REQUIRE(
      outputs.size() == static_cast<size_t>(size_) && inputs.size() == static_cast<size_t>(size_), "all_to_all needs ",
      size_, " outputs and ", size_, " inputs");
  return exchange(OpType::ALLTOALL, {}, outputs, inputs, opts.timeout);
}

WorkPtr CclBackend::alltoall_base(
    Tensor& output, Tensor& input, std::vector<int64_t>& output_rows, std::vector<int64_t>& input_rows,
    const c10d::AllToAllOptions& opts) {
  check_dense({output, input});
  CPUTRAIN_REQUIRE(output.scalar_type() == input.scalar_type(), "all_to_all needs inputs and outputs of one type");
  const auto from = input.contiguous();
  const auto to = output.contiguous();
  Agreement agreement;
  agreement.add(static_cast<uint64_t>(from.scalar_type()));
  agreement.give = parts(from, input_rows);
  agreement.receive = parts(to, output_rows);
  CPUTRAIN_REQUIRE(
      agreement.give[rank_] == agreement.receive[rank_], "all_to_all: this rank has ", agreement.give[rank_],
      " bytes for itself, and expects ", agreement.receive[rank_]);
  return submit(
      OpType::ALLTOALL_BASE, {from}, agreement, opts.timeout, {output},
      [=, this, receive = agreement.receive, give = agreement.give] {
        Events events;
        events.push_back(
            ccl::alltoallv(from.data_ptr(), give, to.data_ptr(), receive, ccl::datatype::uint8, *comm_));
        return events;
      },
      copier({output}, {to}));
}

// Returns a list with a tensor for one rank and undefined tensors for all others.
Tensors CclBackend::only(const Tensor& tensor, int64_t rank) const {
  Tensors tensors(size_);
  tensors[rank] = tensor;
  return tensors;
}

// Sends tensor i of `inputs` to rank i and receives tensor i of `outputs` from it; undefined tensors are skipped.
WorkPtr CclBackend::exchange(
    OpType type, Agreement agreement, const Tensors& outputs, const Tensors& inputs, Milliseconds timeout) {
  Tensors targets, received, sent;
  std::vector<size_t> receive(size_, 0), give(size_, 0);
  for (int rank = 0; rank < size_; rank++) {
    if (outputs[rank].defined()) {
      check_dense(outputs[rank]);
      targets.push_back(outputs[rank]);
      receive[rank] = outputs[rank].nbytes();
    }
    if (inputs[rank].defined()) {
      check_dense(inputs[rank]);
      sent.push_back(bytes_of(inputs[rank].contiguous()).clone());
      give[rank] = inputs[rank].nbytes();
    }
  }
  const auto from = sent.empty() ? at::empty({0}, at::kByte) : at::cat(sent);
  const auto to =
      at::empty({static_cast<int64_t>(std::accumulate(receive.begin(), receive.end(), size_t{0}))}, at::kByte);
  int64_t start = 0;
  for (const auto& target : targets) {
    const auto end = start + static_cast<int64_t>(target.nbytes());
    received.push_back(to.slice(0, start, end));
    start = end;
  }
  const auto described = sent_or_received(inputs, outputs);
  if (type == OpType::ALLTOALL) {  // for other types, all sizes are equal
    agreement.add(static_cast<uint64_t>(described[0].scalar_type()));
    agreement.give = give;
    agreement.receive = receive;
  }
  CPUTRAIN_REQUIRE(
      give[rank_] == receive[rank_], c10d::opTypeToString(type), ": this rank has ", give[rank_],
      " bytes for itself, and expects ", receive[rank_]);
  return submit(
      type, described, std::move(agreement), timeout, targets,
      [=, this] {
        Events events;
        events.push_back(
            ccl::alltoallv(from.data_ptr(), give, to.data_ptr(), receive, ccl::datatype::uint8, *comm_));
        return events;
      },
      [=] {
        for (size_t i = 0; i < targets.size(); i++) {
          const auto whole = at::empty(targets[i].sizes(), targets[i].options());
          bytes_of(whole).copy_(received[i]);
          targets[i].copy_(whole);
        }
      });
}

// Returns the bytes of each rank's rows of a contiguous tensor; equal parts if `rows` is empty.
std::vector<size_t> CclBackend::parts(const Tensor& tensor, const std::vector<int64_t>& rows) const {
  const auto all = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (rows.empty()) {
    CPUTRAIN_REQUIRE(all % size_ == 0, "all_to_all: ", all, " rows cannot be split into ", size_, " equal parts");
    return std::vector<size_t>(size_, tensor.nbytes() / size_);
  }
  CPUTRAIN_REQUIRE(
      rows.size() == static_cast<size_t>(size_) && std::accumulate(rows.begin(), rows.end(), int64_t{0}) == all,
      "all_to_all: needs ", size_, " split sizes with a sum of ", all);
  const auto row = all == 0 ? 0 : tensor.nbytes() / all;
  std::vector<size_t> bytes;
  for (const auto count : rows) {
    bytes.push_back(count * row);
  }
  return bytes;
}

WorkPtr CclBackend::send(Tensors& tensors, int to, int tag) {
  check_one(tensors);
  check_dense(tensors);
  CPUTRAIN_REQUIRE(to != rank_, "rank ", rank_, " cannot send to itself");
  const auto message = std::make_shared<Send>(
      Send{{tag, static_cast<int64_t>(tensors[0].nbytes())}, tensors[0].contiguous()});
  return submit_message(
      OpType::SEND, tensors, to,
      [message, to, outbox = outbox_]() -> Poll {
        outbox->post(message, to);
        return [message, to, outbox] {
          if (message->state != Send::State::ended) {
            outbox->progress(to);
          }
          return message->state == Send::State::ended;
        };
      },
      [] {});
}

WorkPtr CclBackend::recv(Tensors& tensors, int from, int tag) {
  check_one(tensors);
  CPUTRAIN_REQUIRE(from != rank_, "rank ", rank_, " cannot receive from itself");
  return receive(OpType::RECV, tensors[0], from, tag);
}

WorkPtr CclBackend::recvAnysource(Tensors& tensors, int tag) {
  check_one(tensors);
  return receive(OpType::RECVANYSOURCE, tensors[0], kAnySource, tag);
}

WorkPtr CclBackend::receive(OpType type, const Tensor& tensor, int from, int tag) {
  check_dense(tensor);
  const auto awaited = std::make_shared<Receive>(Receive{from, tag, tensor.contiguous()});
  return submit_message(
      type, {tensor}, from,
      [awaited, inbox = inbox_]() -> Poll {
        inbox->expect(awaited);
        return [awaited, inbox] {
          if (!awaited->ended) {
            inbox->progress();
          }
          return awaited->ended;
        };
      },
      [awaited, tensor, tag] {
        CPUTRAIN_REQUIRE(
            awaited->found_bytes == static_cast<int64_t>(tensor.nbytes()), "ccl: recv of ", tensor.nbytes(),
            " bytes with tag ", tag, " met a message of ", awaited->found_bytes, " bytes from rank ", awaited->source,
            " of its group");
        copier({tensor}, {awaited->buffer})();
      },
      [awaited] { return awaited->source; });
}

}  // namespace cputrain
