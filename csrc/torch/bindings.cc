// The Python module ringcomm._C (see ringcomm/_C.pyi).
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>

#include "base/stream_copy.h"
#include "device/kernels_for.h"
#include "plan/registry.h"
#include "plan/rules.h"
#include "reduce/quantize.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/module.h"
#include "torch/park.h"
#include "torch/tensors.h"

namespace ringcomm {
namespace {

namespace py = pybind11;
using namespace py::literals;
using NoGil = py::call_guard<py::gil_scoped_release>;

constexpr auto kGraceAtExit = std::chrono::milliseconds(500);

std::vector<py::bytes> to_bytes(const std::vector<std::string>& rings) {
  return {rings.begin(), rings.end()};
}

// Returns what a function of the package answers; its errors are the user's.
template <typename Answer>
Answer ask(const char* module, const char* function, const auto&... arguments) {
  const py::gil_scoped_acquire gil;
  try {
    return py::module_::import(module).attr(function)(arguments...).template cast<Answer>();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // Ctrl-C
    throw UsageError(py::str(error.value()));
  }
}

int distance(const std::vector<std::string>& addresses) {
  return ask<int>("ringcomm._runtime.addresses", "distance", addresses);
}

Places choose_places(const ProcessConfig& config, const std::string& store_host) {
  using Chosen = std::tuple<std::vector<std::string>, uint16_t, uint16_t>;
  const auto [addresses, first, last] =
      ask<Chosen>("ringcomm._runtime.addresses", "places", config.ifname, config.ports, store_host);
  return {addresses, first, last};
}

std::string read_costs(const std::string& file) {
  return ask<std::string>("ringcomm._network.costs", "word", file);
}

// Returns the caller's options, with torch's words about the group filled in. torch's argument
// `timeout` wins over that of the options, as it does with torch's own backends.
GroupOptionsPtr options_of(const c10d::DistributedBackendOptions& torch,
                           const GroupOptionsPtr& given) {
  auto options = c10::make_intrusive<ringcomm::Options>(*given);
  constexpr double kMost =
      9e18;  // that an int64_t holds; torch's may be as long as a float can say
  const double milliseconds = std::ceil(static_cast<double>(torch.timeout.count()) * 1e3);
  options->timeout = checked_timeout(
      std::chrono::milliseconds(static_cast<int64_t>(std::clamp(milliseconds, -kMost, kMost))));
  options->group_name = torch.group_id;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  options->enable_reconfigure = options->enable_reconfigure || torch.enable_reconfigure;
#endif
  options->global_ranks_in_group.assign(torch.global_ranks_in_group.begin(),
                                        torch.global_ranks_in_group.end());
  return options;
}

// Texts that have a grammar of the core's own.
void check(const Config& config) {
  with_value_errors([&] {
    if (config.algorithm) Rules(*config.algorithm);
  });
}

// ringcomm/options.py fills these in, and makes the attributes of Options from them.
void bind_options(py::module_& module) {
  py::class_<Config>(module, "Config")
      .def(py::init<>())
      .def("check", &check)
      .def_property(
          "log", [](const Config& self) { return static_cast<int>(self.log); },
          [](Config& self, int level) { self.log = static_cast<LogLevel>(level); })
      .def_readwrite("algorithm", &Config::algorithm)
      .def_readwrite("congestion", &Config::congestion)
      .def_readwrite("costs", &Config::costs)
      .def_readwrite("cuda_connections", &Config::cuda_connections)
      .def_readwrite("cuda_library", &Config::cuda_library)
      .def_readwrite("cuda_memory", &Config::cuda_memory)
      .def_readwrite("cuda_blocks", &Config::cuda_blocks)
      .def_readwrite("cuda_mode", &Config::cuda_mode)
      .def_readwrite("flows", &Config::flows)
      .def_readwrite("host", &Config::host)
      .def_readwrite("ifname", &Config::ifname)
      .def_readwrite("metrics", &Config::metrics)
      .def_readwrite("ports", &Config::ports)
      .def_readwrite("resume_seconds", &Config::resume_seconds)
      .def_readwrite("run", &Config::run)
      .def_readwrite("secret", &Config::secret)
      .def_readwrite("shared_buffers", &Config::shared_buffers)
      .def_readwrite("spin_us", &Config::spin_us)
      .def_readwrite("threads", &Config::threads)
      .def_readwrite("tls", &Config::tls)
      .def_readwrite("tls_ca", &Config::tls_ca)
      .def_readwrite("tls_cert", &Config::tls_cert)
      .def_readwrite("tls_key", &Config::tls_key)
      .def_readwrite("trace", &Config::trace)
      .def_readwrite("trace_lines", &Config::trace_lines)
      .def_readwrite("transport", &Config::transport);
  module.def("configure", [](Config config) {
    config.places = &choose_places;
    config.distance = &distance;
    config.costs_text = &read_costs;
    config.ring = [](int rank, uint64_t bytes) {
      return ask<int>("ringcomm._flight.recorder", "make_file", rank, bytes);
    };
    Process::get().configure(config);
  });

  py::class_<ringcomm::Options, GroupOptionsPtr, c10d::Backend::Options>(module, "Options")
      .def(py::init<std::chrono::milliseconds>(), py::arg("timeout") = kBackendDefaultTimeout)
      .def(py::init<const ringcomm::Options&>())
      .def_readwrite("_config", &ringcomm::Options::config)
      .def_readwrite("_given", &ringcomm::Options::given)
      .def_readwrite("enable_reconfigure", &ringcomm::Options::enable_reconfigure)
      .def_readwrite("_links", &ringcomm::Options::links)
      .def_readwrite("_check_members", &ringcomm::Options::check_members);
}

// The methods that torch's own backends have beside those of the base class; some are in
// ringcomm/_runtime/library.py.
void bind_backend(py::module_& module) {
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "Backend")
      .def_property_readonly("options",
                             [](Backend& self) {
                               return py::module_::import("ringcomm._runtime.options")
                                   .attr("Options")
                                   .attr("_of")(self.getBackendOptions());
                             })
      .def_property_readonly("uid", &Backend::getGroupUid)
      .def("get_error", &Backend::getError, NoGil())
      .def("_flight_rings",
           [](const Backend& backend) { return to_bytes(backend.group()->flight_rings()); })
      .def(
          "_is_device_good",
          [](Backend& backend) {
            const auto group = backend.group();
            DeviceEngine* const engine = group->device().in_use();
            return engine == nullptr || engine->verdicts().is_all_good();
          },
          NoGil())
      .def("_set_default_timeout", &Backend::setTimeout, py::arg("timeout"))
      .def("_close", [](Backend& backend) { backend.close(false); })
      .def("_forget_batch", &Backend::forget_batch, NoGil())
      .def("_add_ephemeral_timeout", &Backend::addEphemeralTimeout, py::arg("timeout"))
      .def("_reconfigure_handle", &Backend::reconfigure_handle, NoGil())
      .def("_reconfigure", &Backend::reconfigure_to, py::arg("uuid"), py::arg("handles"),
           py::arg("timeout") = py::none(), py::arg("check") = nullptr, NoGil())
      .def("_register_memory", &Backend::register_memory, py::arg("asked"), py::arg("memory"),
           py::arg("device"), NoGil())
      .def("_deregister_memory", &Backend::deregister_memory, py::arg("name"), NoGil())
      .def("_set_codes", &Backend::set_codes, py::arg("codes"))
      .def("_readable_operations",
           [](Backend& backend) { return backend.group()->host().readable_operations(); })
      .def("rank", &Backend::rank)  // torch's own cannot change before 2.14
      .def("size", &Backend::size)
      .def("comm_split_count", &Backend::splits);
  py::class_<Works, c10::intrusive_ptr<Works>, c10d::Work>(module, "Works")
      .def_property_readonly("parts", &Works::parts);
}

// An algorithm of the program's own: ringcomm/algorithms/registry.py has its scripts, by shape.
void register_by_name(const std::string& name, const std::vector<int>& collectives) {
  std::vector<Collective> all;
  for (const int number : collectives) all.push_back(static_cast<Collective>(number));
  const auto author = [name](const Shape& shape, Rank rank) -> Script {
    const auto& [size, segment, room, inbox, slots, line, one_shot] = shape.geometry;
    const std::vector<uint64_t> geometry = {segment, room, inbox, slots, line, one_shot};
    const auto given =
        std::make_tuple(static_cast<int>(shape.collective), shape.size, shape.local, shape.element,
                        shape.root, shape.bytes, shape.shards, shape.send, shape.recv, geometry);
    using Answer = std::tuple<std::vector<int64_t>, uint64_t>;
    auto [words, code] =
        ask<Answer>("ringcomm.algorithms.registry", "script_for", name, given, rank);
    return {std::move(words), code};
  };
  with_value_errors([&] { register_algorithm(name, all, author); });
}

// Returns the kernel that the model of devices chooses, and the seconds of each that serves the
// collective. `bytes`: the message's, as rules count them.
py::tuple kernel_seconds(const std::string& collective, int ranks, uint64_t bytes, bool nvlink,
                         int capability) {
  constexpr uint64_t kWindow = 12 << 20;  // the least that groups have
  const auto known = collective_called(collective);
  if (!known || ranks < 2 || ranks > cuda::kMostRanks)
    throw py::value_error(str(collective, " of ", ranks, " ranks"));
  Shape shape;
  shape.collective = *known;
  shape.size = ranks;
  shape.bytes = bytes;
  shape.shards.assign(sharded(shape.collective) ? static_cast<size_t>(ranks) : 0, bytes);
  const cuda::DeviceLink link = cuda::link_of(nvlink, capability, GroupConfig().cuda_blocks);
  py::dict seconds;
  for (int i = 0; i < kNamed; ++i) {
    const auto kernel = static_cast<Algorithm>(i);
    const bool runs = is_kernel(kernel) && kernel != kByGraph;
    if (runs && cuda::kernel_for(shape, link, kWindow, kernel) == kernel)
      seconds[to_string(kernel)] = cuda::seconds_of(kernel, shape, link);
  }
  return py::make_tuple(to_string(cuda::kernel_for(shape, link, kWindow)), seconds);
}

// In steps of a segment, as plans copy. Both are contiguous tensors of the CPU, and equally long.
void copy_tensor(const at::Tensor& to, const at::Tensor& from, bool past_caches) {
  constexpr uint64_t kStep = 256 << 10;
  const Span dst = span_of(to), src = span_of(from);
  for (uint64_t at = 0; at < std::min(dst.bytes, src.bytes); at += kStep) {
    copy_bytes(dst.data + at, src.data + at, std::min(kStep, src.bytes - at), past_caches);
  }
}

// Returns the bytes of a source's blocks, which must be whole and hold all numbers.
uint64_t whole_blocks(const at::Tensor& blocks, const at::Tensor& numbers, uint64_t sources) {
  const uint64_t bytes = bytes_of(blocks) / std::max<uint64_t>(1, sources);
  TORCH_CHECK_VALUE(blocks.is_contiguous() && numbers.is_contiguous() && sources > 0 &&
                        bytes * sources == bytes_of(blocks) && bytes % kBlockBytes == 0 &&
                        bytes / kBlockBytes >= blocks_of(static_cast<uint64_t>(numbers.numel())),
                    "tensors must be contiguous, and blocks whole: of all numbers of each source");
  return bytes;
}

// Serves tensors of the CPU (ringcomm/compression/codecs.py). Blocks beyond those of `src` get
// zeros.
void quantize_tensor(const at::Tensor& src, const at::Tensor& blocks, int coding,
                     const std::optional<at::Tensor>& residual, std::optional<uint64_t> seed,
                     uint32_t first) {
  const auto count = static_cast<uint64_t>(src.numel());
  const uint64_t bytes = whole_blocks(blocks, src, 1), used = blocks_of(count) * kBlockBytes;
  TORCH_CHECK_VALUE(!residual || (residual->numel() == src.numel() && residual->is_contiguous()),
                    "the residual must have as many numbers as the tensor");
  auto* const to = reinterpret_cast<std::byte*>(blocks.mutable_data_ptr<uint8_t>());
  quantize(Coding{static_cast<uint8_t>(coding)},
           {.src = src.const_data_ptr<float>(),
            .residual = residual ? residual->mutable_data_ptr<float>() : nullptr,
            .blocks = to,
            .count = count,
            .by_chance = seed.has_value(),
            .seed = seed.value_or(0),
            .first = first});
  std::memset(to + used, 0, bytes - used);
}

void dequantize_tensor(const at::Tensor& blocks, const at::Tensor& out, int coding,
                       uint64_t sources, float divisor) {
  const uint64_t bytes = whole_blocks(blocks, out, sources);
  dequantize(Coding{static_cast<uint8_t>(coding)},
             {.blocks = reinterpret_cast<const std::byte*>(blocks.const_data_ptr<uint8_t>()),
              .source_bytes = bytes,
              .sources = sources,
              .divisor = divisor,
              .dst = out.mutable_data_ptr<float>(),
              .count = static_cast<uint64_t>(out.numel())});
}

// For ringcomm/compression/quantized.py.
void bind_blocks(py::module_& module) {
  module.def("quantize", &quantize_tensor, py::arg("src"), py::arg("blocks"), py::arg("coding"),
             py::arg("residual") = py::none(), py::arg("seed") = py::none(), py::arg("first") = 0,
             NoGil());
  module.def("dequantize", &dequantize_tensor, py::arg("blocks"), py::arg("out"), py::arg("coding"),
             py::arg("sources") = 1, py::arg("divisor") = 1.0F, NoGil());
}

// The core as Python sees it beside groups: names, host identities and the registry of algorithms;
// for the benchmarks and the tests, copies and the model of devices, too.
void bind_core(py::module_& module) {
  module.attr("PURPOSES") = py::tuple(py::cast(kPurposeNames));
  module.def("copy", &copy_tensor, NoGil());
  module.def(
      "empty",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype) {
        return empty_readable(sizes, at::TensorOptions(dtype), UINT64_MAX);
      },
      py::arg("sizes"), py::arg("dtype"), NoGil());
  module.def("kernel_seconds", &kernel_seconds, py::arg("collective"), py::arg("ranks"),
             py::arg("bytes"), py::arg("nvlink"), py::arg("capability"));
  module.def("register_algorithm", &register_by_name, py::arg("name"), py::arg("collectives"));
  using Identity = std::tuple<std::string, std::string, std::string, uid_t>;
  module.def("host_identity", [] {
    const HostIdentity self = host_identity();
    return Identity(self.host, self.boot_id, self.network, self.user);
  });
  module.def("build", [] { return make_card().build; });
  module.def("same_host", [](const Identity& a, const Identity& b) {
    return std::make_from_tuple<HostIdentity>(a).same_host(std::make_from_tuple<HostIdentity>(b));
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch._C._distributed_c10d");  // the base classes
  bind_options(module);
  bind_backend(module);
  bind_blocks(module);
  bind_core(module);
  bind_elastic(module);

  module.def(
      "create_backend",
      [](const c10d::DistributedBackendOptions& torch, const GroupOptionsPtr& given, bool cuda,
         bool waits) {
        GroupOptionsPtr options = options_of(torch, given);
        options->cuda = cuda;
        const py::gil_scoped_release no_gil;
        return Backend::create(torch.store, {torch.group_rank, torch.group_size},
                               std::move(options), waits);
      },
      py::arg("options"), py::arg("backend_options"), py::arg("cuda") = true,
      py::arg("waits") = false);

  module.def("announce_device", &announce_device, py::arg("device"), NoGil());
  module.def("flight_rings", [] { return to_bytes(Groups::get().flight_rings()); });
  module.def("ask_for_records", [] { Groups::get().ask_for_records(); }, NoGil());
#ifdef C10D_BACKEND_HAS_HOOKS
  module.attr("calls_hooks") = true;
#else
  module.attr("calls_hooks") = false;
#endif
  module.def("tell_failures", [] { BackendStates::get().tell_failures(); }, NoGil());
  module.def("look_at_groups", [] { return Groups::get().hear_peers(); }, NoGil());
  module.def("tell_failures_to", [](int pipe) { Process::get().tell_failures_to(pipe); });
  module.def("close_groups", [](const std::string& error) {
    std::vector<int> calling;
    without_gil([&] { calling = Groups::close_all(kGraceAtExit, error); });
    park(calling);
  });
}

}  // namespace ringcomm
