// Records the operators that torch computes in a thread, by name and arguments: number, time, and kernels of ours.
// What is recorded is the outermost operator that torch dispatches to a kernel; what is composed of other operators, such
// as aten::linear, is recorded as these. A kernel is an event inside (operators.hpp).

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>

namespace {

using c10::IValue;

constexpr char kKernel[] = "cputrain: ";
constexpr double kNs = 1e9;

struct Spent {
  int64_t count = 0, ns = 0;
  std::set<std::string> kernels;
};

// An operator that the thread computes.
struct Open : at::ObserverContext {
  std::string call;
  int64_t begin = 0;
  std::set<std::string> kernels;
};

// Calls by their JSON, between `after` and `until` ns from the first operator on.
struct Recording {
  std::unordered_map<std::string, Spent> calls;
  int64_t after = 0, until = 0, origin = -1, first = -1, last = -1;
  std::optional<at::CallbackHandle> callback;
};

Recording recording;  // used by its thread alone
thread_local bool is_recorded = false;
thread_local Open* outermost = nullptr;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Whether an operator computes: it is neither composed of others nor a view of an argument.
bool computes(const c10::OperatorName& name) {
  static std::unordered_map<c10::OperatorName, bool> known;
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  bool result = false;
  if (handle.has_value()) {
    bool is_alias = false, is_written = false;
    for (const c10::Argument& argument : handle->schema().arguments()) {
      if (argument.alias_info() == nullptr) continue;
      (argument.alias_info()->isWrite() ? is_written : is_alias) = true;
    }
    const bool is_view = is_alias && !is_written;
    result = !is_view && !handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  }
  return known.emplace(name, result).first->second;
}

template <typename Values>
void write_numbers(std::ostream& out, const Values& values) {
  out << '[';
  const char* separator = "";
  for (const auto value : values) {
    out << separator << static_cast<int64_t>(value);
    separator = ",";
  }
  out << ']';
}

void write_tensor(std::ostream& out, const at::Tensor& value) {
  if (!value.defined() || value.layout() != at::kStrided || value.is_nested() ||
      value.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    out << "null";
    return;
  }
  out << "{\"shape\":";
  write_numbers(out, value.sizes());
  out << ",\"strides\":";
  write_numbers(out, value.strides());
  out << ",\"dtype\":\"" << c10::toString(value.scalar_type()) << "\"}";
}

// Floating-point numbers are 1: they change from step to step, and no shape depends on them.
void write(std::ostream& out, const IValue& value) {
  if (value.isTensor()) {
    write_tensor(out, value.toTensor());
  } else if (value.isInt()) {
    out << value.toInt();
  } else if (value.isBool()) {
    out << (value.toBool() ? "true" : "false");
  } else if (value.isDouble()) {
    out << 1;
  } else if (value.isString() && value.toStringRef().find_first_of("\"\\\n") == std::string::npos) {
    out << '"' << value.toStringRef() << '"';
  } else if (value.isList()) {
    out << '[';
    const char* separator = "";
    for (const IValue& element : value.toListRef()) {
      out << separator;
      write(out, element);
      separator = ",";
    }
    out << ']';
  } else {
    out << "null";
  }
}

std::string text_of(const c10::OperatorName& name, c10::ArrayRef<const IValue> arguments) {
  std::ostringstream out;
  out << "\"name\":\"" << name.name << "\",\"overload\":\"" << name.overload_name << "\",\"arguments\":[";
  const char* separator = "";
  for (const IValue& value : arguments) {
    out << separator;
    write(out, value);
    separator = ",";
  }
  out << ']';
  return out.str();
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  if (!is_recorded) return nullptr;
  if (outermost != nullptr) {
    if (std::strncmp(function.name(), kKernel, sizeof(kKernel) - 1) == 0) {
      outermost->kernels.insert(function.name() + sizeof(kKernel) - 1);
    }
    return nullptr;
  }
  const auto name = function.operator_name();
  if (!name.has_value() || !computes(*name)) return nullptr;
  if (recording.origin < 0) recording.origin = now();
  const int64_t at = now() - recording.origin;
  if (at < recording.after || at >= recording.until) return nullptr;
  auto open = std::make_unique<Open>();
  open->call = text_of(*name, function.inputs());
  outermost = open.get();
  open->begin = now();
  return open;
}

void end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr || context != outermost) return;
  const int64_t ended = now();
  Spent& spent = recording.calls[outermost->call];
  ++spent.count;
  spent.ns += ended - outermost->begin;
  spent.kernels.merge(outermost->kernels);
  if (recording.first < 0) recording.first = outermost->begin;
  recording.last = ended;
  outermost = nullptr;
}

}  // namespace

extern "C" {

// Ends a recording of this thread, which has the time limits of begin_recording; what was recorded stays.
void end_recording() {
  if (recording.callback.has_value()) at::removeCallback(*recording.callback);
  recording.callback.reset();
}

// Records this thread anew, from `after_s` to `until_s` after its first operator.
void begin_recording(double after_s, double until_s) {
  end_recording();
  recording = Recording();
  recording.after = static_cast<int64_t>(after_s * kNs);
  recording.until = static_cast<int64_t>(until_s * kNs);
  is_recorded = true;
  recording.callback = at::addGlobalCallback(
      at::RecordFunctionCallback(begin, end).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

// Returns where a recording is: 0 before its time, 1 in it, 2 after it.
int recording_stage() {
  if (recording.origin < 0) return 0;
  const int64_t at = now() - recording.origin;
  return at < recording.after ? 0 : at < recording.until ? 1 : 2;
}

// Returns what was recorded, as JSON.
const char* recorded() {
  static std::string text;
  std::ostringstream out;
  const bool any = recording.first >= 0;
  out << "{\"skipped_s\":" << (any ? (recording.first - recording.origin) / kNs : 0.0)
      << ",\"recorded_s\":" << (any ? (recording.last - recording.first) / kNs : 0.0) << ",\"calls\":[";
  const char* separator = "";
  for (const auto& [call, spent] : recording.calls) {
    out << separator << '{' << call << ",\"count\":" << spent.count << ",\"ns\":" << spent.ns << ",\"kernels\":[";
    const char* before = "";
    for (const std::string& kernel : spent.kernels) {
      out << before << '"' << kernel << '"';
      before = ",";
    }
    out << "]}";
    separator = ",";
  }
  out << "]}";
  text = out.str();
  return text.c_str();
}
}
