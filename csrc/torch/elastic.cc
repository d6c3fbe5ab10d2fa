#include "torch/elastic.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <thread>

#include "net/checksum.h"
#include "torch/backend.h"
#include "torch/errors.h"

namespace ringcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// The witness in the store. The store may not answer, so each question has a thread of its own,
// which is not waited for.
class StoredWitness {
 public:
  StoredWitness(StorePtr store, std::string key) : store_(std::move(store)), key_(std::move(key)) {}

  std::optional<Witness> operator()(const Decree::Request& request) {
    if (!asked_ || *asked_ != request || (state_->failed && !state_->answer)) ask(request);
    return state_->over ? state_->answer : std::nullopt;
  }

 private:
  struct State {
    std::atomic<bool> over{false}, failed{false};  // partner: operator()
    std::optional<Witness> answer;
  };

  void ask(const Decree::Request& request) {
    if (state_->failed && Clock::now() < again_) return;
    again_ = Clock::now() + std::chrono::milliseconds(200);
    asked_ = request;
    state_ = std::make_shared<State>();
    std::thread([state = state_, store = store_, key = key_, request] {
      try {
        state->answer = exchange(*store, key, request);
      } catch (const std::exception&) {
        state->failed = true;
      }
      state->over = true;
    }).detach();
  }

  static Witness exchange(c10d::Store& store, const std::string& key,
                          const Decree::Request& request) {
    std::vector<uint8_t> before;
    while (true) {
      const Witness known = from_bytes(before);
      const auto wanted = bytes_of(Decree::answer(known, request));
      const auto now = store.compareSet(key, before, wanted);
      if (now == wanted) return from_bytes(now);
      before = now;
    }
  }

  // A slip has room for what a witness says.
  static std::vector<uint8_t> bytes_of(const Witness& witness) {
    Slip slip;
    slip.promised = witness.promised;
    slip.accepted = witness.accepted;
    slip.value = witness.value;
    const auto bytes = to_bytes(slip);
    const auto* const data = reinterpret_cast<const uint8_t*>(bytes.data());
    return {data, data + bytes.size()};
  }
  static Witness from_bytes(const std::vector<uint8_t>& bytes) {
    const auto slip = slip_from(std::as_bytes(std::span(bytes)));
    return slip ? Witness{slip->promised, slip->accepted, slip->value} : Witness{};
  }

  const StorePtr store_;
  const std::string key_;
  std::optional<Decree::Request> asked_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  Clock::time_point again_;
};

Members members_of(const std::vector<int>& ranks) {
  Members members;
  for (const int rank : ranks) members.set(static_cast<size_t>(rank));
  return members;
}

// 64 bits of a contiguous tensor's bytes on the CPU: a CRC32C of each half.
uint64_t checksum_of(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.is_contiguous(),
                    "checksum() takes a contiguous tensor on the CPU");
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  const size_t bytes = tensor.nbytes(), half = bytes / 2;
  return uint64_t{checksum(data, half)} << 32 | checksum(data + half, bytes - half);
}

}  // namespace

void bind_elastic(py::module_& module) {
  module.def("checksum", &checksum_of, py::arg("tensor"), NoGil());
  // What other processes know this one by (transport/host.h).
  module.def("card", [] { return Runtime::get().neighbours().card().to_text(); }, NoGil());

  py::class_<Agreement::Answer>(module, "Answer")
      .def_readonly("epoch", &Agreement::Answer::epoch)
      .def_readonly("stays", &Agreement::Answer::stays)
      .def_readonly("ranks", &Agreement::Answer::from)
      .def_property_readonly("step", [](const Agreement::Answer& it) { return it.decision.step; })
      .def_property_readonly("extra",
                             [](const Agreement::Answer& it) { return it.decision.extra; });

  py::class_<Agreement, std::shared_ptr<Agreement>>(module, "Agreement")
      .def(py::init([](const std::string& run) {
             Runtime& runtime = Runtime::get();
             return std::make_shared<Agreement>(runtime.neighbours(), run,
                                                Logger(runtime.config().log, "elastic"));
           }),
           py::arg("run"))
      .def(
          "adopt",
          [](Agreement& agreement, const Backend& backend, uint32_t epoch, int guests,
             const std::vector<int>& ranks, uint64_t step, const std::string& extra) {
            const Decision made{members_of(ranks), step, extra};
            agreement.adopt(backend.group().state().transport(), epoch, guests, made);
          },
          py::arg("backend"), py::arg("epoch"), py::arg("guests") = 0,
          py::arg("ranks") = std::vector<int>(), py::arg("step") = 0, py::arg("extra") = "",
          NoGil())
      .def("expect", &Agreement::expect, py::arg("guests"), NoGil())
      .def(
          "agree",
          [](Agreement& agreement, uint64_t decided, bool voted, const std::string& extra,
             const StorePtr& store, const std::string& key, std::chrono::milliseconds patience,
             std::chrono::milliseconds timeout) {
            Agreement::Question question{decided, voted, extra, patience, {}, run_signal_handlers};
            if (store) question.witness = StoredWitness(store, key);
            return with_torch_errors([&] { return agreement.agree(question, timeout); });
          },
          py::arg("decided"), py::arg("voted"), py::arg("extra"), py::arg("store"), py::arg("key"),
          py::arg("patience"), py::arg("timeout"), NoGil())
      .def("leave", &Agreement::leave, NoGil());
}

}  // namespace ringcomm
