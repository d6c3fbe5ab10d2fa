// The Python module ringcomm._C (see ringcomm/_C.pyi).
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/stream_copy.h"
#include "torch/backend.h"
#include "torch/elastic.h"
#include "torch/errors.h"
#include "torch/park.h"

namespace ringcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using OptionsPtr = c10::intrusive_ptr<ringcomm::Options>;

constexpr auto kGraceAtExit = std::chrono::milliseconds(500);

// Times are seconds; `began` is on the clock of time.time().
py::list flight_record(const Backend& backend) {
  using Seconds = std::chrono::duration<double>;
  std::vector<Record> records;
  {
    const py::gil_scoped_release no_gil;
    records = backend.group().records();
  }
  const auto now = Clock::now();
  const Seconds wall = std::chrono::system_clock::now().time_since_epoch();
  py::list list;
  for (const Record& record : records) {
    const bool over =
        record.state == Record::State::kDone || record.state == Record::State::kFailed;
    py::dict entry;
    entry["operation"] = to_text(record.descriptor);
    entry["sequence"] = record.descriptor.sequence;
    entry["state"] = to_string(record.state);
    entry["began"] = (wall - Seconds(now - record.began)).count();
    entry["seconds"] = Seconds((over ? record.ended : now) - record.began).count();
    list.append(entry);
  }
  return list;
}

// Returns the caller's options, with torch's words about the group filled in. torch's argument
// `timeout` wins over that of the options, as it does with torch's own backends.
OptionsPtr options_of(const c10d::DistributedBackendOptions& torch, const py::object& given) {
  if (!given.is_none() && !py::isinstance<ringcomm::Options>(given)) {
    throw py::type_error(str("pg_options of a ringcomm group must be ringcomm.Options, not ",
                             py::str(py::type::of(given).attr("__name__")).cast<std::string>()));
  }
  auto options = given.is_none()
                     ? c10::make_intrusive<ringcomm::Options>()
                     : c10::make_intrusive<ringcomm::Options>(*given.cast<OptionsPtr>());
  constexpr double kMost = 3.2e12;  // a century, in milliseconds
  const double milliseconds = std::min(kMost, static_cast<double>(torch.timeout.count()) * 1e3);
  options->timeout = std::chrono::milliseconds(static_cast<int64_t>(milliseconds));
  options->group_name = torch.group_id;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  options->enable_reconfigure = options->enable_reconfigure || torch.enable_reconfigure;
#endif
  options->global_ranks_in_group.assign(torch.global_ranks_in_group.begin(),
                                        torch.global_ranks_in_group.end());
  return options;
}

void bind_options(py::module_& module) {
  const auto copy = [](const ringcomm::Options& self, const py::args&) {
    return c10::make_intrusive<ringcomm::Options>(self);
  };
  py::class_<ringcomm::Options, OptionsPtr, c10d::Backend::Options>(module, "Options")
      .def(py::init<std::chrono::milliseconds>(), py::arg("timeout") = kBackendDefaultTimeout)
      .def_property(
          "algorithm", [](const ringcomm::Options& self) { return self.algorithm; },
          [](ringcomm::Options& self, const std::optional<std::string>& name) {
            if (name) with_value_errors([&] { return algorithm_called(*name); });
            self.algorithm = name;
          })
      .def_readwrite("enable_reconfigure", &ringcomm::Options::enable_reconfigure)
      .def_readwrite("_agreement", &ringcomm::Options::agreement)
      .def("__copy__", copy)
      .def("__deepcopy__", copy);
}

// The methods that torch's own backends have beside those of the base class.
void bind_backend(py::module_& module) {
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "Backend")
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def_property_readonly("uid", &Backend::getGroupUid)
      .def("get_error", &Backend::getError, NoGil())
      .def("flight_record", &flight_record)
      .def(
          "_is_device_good",
          [](Backend& backend) {
            DeviceEngine* const engine = backend.group().device_in_use();
            return engine == nullptr || engine->is_all_good();
          },
          NoGil())
      .def("_set_default_timeout", &Backend::setTimeout, py::arg("timeout"))
      .def("_add_ephemeral_timeout", &Backend::addEphemeralTimeout, py::arg("timeout"))
      .def("_reconfigure_handle", &Backend::reconfigure_handle, NoGil())
      .def("_reconfigure", &Backend::reconfigure_to, py::arg("uuid"), py::arg("handles"),
           py::arg("timeout") = py::none(), NoGil())
      .def("rank", &Backend::rank)  // torch's own cannot change before 2.14
      .def("size", &Backend::size)
      .def("_is_initialized", [](const Backend&) { return true; })
      .def("comm_split_count", &Backend::splits)
      // Ranks outside a split need to do nothing, and a pool's memory needs no registration.
      .def("perform_nocolor_split", [](const Backend&, at::Device) {})
      .def(
          "register_mem_pool", [](const Backend&, const py::object&, bool) {}, py::arg("pool"),
          py::arg("symm") = false)
      .def("deregister_mem_pool", [](const Backend&, const py::object&) {}, py::arg("pool"));
}

std::vector<std::string> names_of_algorithms(const std::string& collective) {
  std::vector<std::string> names;
  for (int i = 0; i < kCollectives; ++i) {
    if (collective != to_string(static_cast<Collective>(i))) continue;
    for (const Algorithm one : algorithms_of(static_cast<Collective>(i))) {
      names.emplace_back(to_string(one));
    }
  }
  TORCH_CHECK_VALUE(!names.empty(), "there is no collective '", collective, "'");
  return names;
}

// Seconds of each of `passes` copies of so many bytes, in steps of a segment as plans copy them.
std::vector<double> copy_seconds(uint64_t bytes, bool past_caches, int passes) {
  constexpr uint64_t kStep = 256 << 10;
  const std::vector<std::byte> from(bytes, std::byte{1});
  std::vector<std::byte> to(bytes);
  std::vector<double> seconds;
  for (int pass = 0; pass < passes; ++pass) {
    const auto start = Clock::now();
    for (uint64_t at = 0; at < bytes; at += kStep) {
      copy_bytes(to.data() + at, from.data() + at, std::min(kStep, bytes - at), past_caches);
    }
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return seconds;
}

// The core seen from Python, for the benchmarks and the tests.
void bind_core(py::module_& module) {
  module.def("algorithms", &names_of_algorithms, py::arg("collective"));
  module.def("copy_seconds", &copy_seconds, py::arg("bytes"), py::arg("past_caches"),
             py::arg("passes"), NoGil());
  module.def(
      "selection_text",
      [](int size, const std::string& costs) {
        return with_value_errors(
            [&] { return selection_text(size, costs.empty() ? Costs{} : parse_costs(costs)); });
      },
      py::arg("size"), py::arg("costs") = "");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch._C._distributed_c10d");  // the base classes
  bind_options(module);
  bind_backend(module);
  bind_core(module);
  bind_elastic(module);

  module.def(
      "create_backend",
      [](const c10d::DistributedBackendOptions& torch, const py::object& given, bool cuda) {
        OptionsPtr options = options_of(torch, given);
        options->cuda = cuda;
        const py::gil_scoped_release no_gil;
        return Backend::create(torch.store, {torch.group_rank, torch.group_size},
                               std::move(options));
      },
      py::arg("options"), py::arg("backend_options") = py::none(), py::arg("cuda") = true);

  module.def("close_groups", [](const std::string& error) {
    std::vector<int> calling;
    {
      const py::gil_scoped_release no_gil;
      calling = Runtime::close_groups(kGraceAtExit, error);
    }
    park(calling);
  });
}

}  // namespace ringcomm
