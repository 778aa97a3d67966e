// Python bindings of the extension.
#include <torch/csrc/utils/pybind.h>

#include "backend.hpp"
#include "heartbeat.hpp"

PYBIND11_MODULE(cputrain_ccl, module) {
  namespace py = pybind11;
  using cputrain::CclBackend;
  using cputrain::Engine;
  using cputrain::HeartbeatSender;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  const py::call_guard<py::gil_scoped_release> without_gil;
  py::class_<CclBackend, c10d::Backend, c10::intrusive_ptr<CclBackend>>(module, "CclBackend")
      .def(
          py::init([](const StorePtr& store, int rank, std::vector<int> ranks, double timeout_s, const std::string& name) {
            const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
            return c10::make_intrusive<CclBackend>(store, rank, std::move(ranks), timeout, name);
          }),
          without_gil);
  // Never destroyed, because its thread runs until it is stopped or the process ends.
  py::class_<HeartbeatSender, std::unique_ptr<HeartbeatSender, py::nodelete>>(module, "HeartbeatSender")
      .def(
          py::init([](const StorePtr& store, const std::string& key, const std::string& token, const std::string& place,
                      double interval_s, uintptr_t hmac, uintptr_t sha256, int copy) {
            return new HeartbeatSender(
                store, key, token, place, interval_s, reinterpret_cast<cputrain::Hmac>(hmac),
                reinterpret_cast<cputrain::Sha256>(sha256), copy);
          }),
          without_gil)
      .def("stop", &HeartbeatSender::stop, without_gil);
  // Returns the collective in flight with the earliest deadline ("" if none), the seconds since its deadline, its
  // group's key and its number there, the digest of the group's collectives so far, the peers of a message, and the
  // seconds for which this rank has waited.
  module.def("pending_collective", [] {
    const auto current = Engine::instance().current();
    const std::chrono::duration<double> overdue = cputrain::awake_now() - current.deadline;
    return std::make_tuple(
        current.collective, current.collective.empty() ? 0.0 : overdue.count(), current.place.group,
        current.place.number, current.place.digest, current.place.peers, current.waited.count());
  });
  module.def("groups", [] { return Engine::instance().groups(); });
  module.def("set_watched", [](bool watched) { Engine::instance().set_watched(watched); });
  module.def("ranks_of_group", [](const std::string& key) { return Engine::instance().ranks_of(key); });
  module.def("set_absent_ranks", [](std::string collective, std::string absent) {
    Engine::instance().set_absent_ranks(std::move(collective), std::move(absent));
  });
  module.def("failure", [] { return Engine::instance().failure(); }, without_gil);
  module.def("disagreement", [] { return Engine::instance().disagreement(); });
  module.def("disagree", [](const std::string& what) { Engine::instance().disagree(what); }, without_gil);
  module.def("abort", [](const std::string& reason) { Engine::instance().abort(reason); }, without_gil);
  module.def("refuse_in_child", [](const std::string& what) { Engine::instance().refuse_in_child(what); });
}
