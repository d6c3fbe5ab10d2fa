#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "net/checksum.h"
#include "torch/backend.h"
#include "torch/module.h"

namespace ringcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

std::vector<Rank> ranks_in(const Members& members) {
  std::vector<Rank> ranks;
  for (size_t rank = 0; rank < kMostMembers; ++rank) {
    if (members.test(rank)) ranks.push_back(static_cast<Rank>(rank));
  }
  return ranks;
}

Slip witness_from(const std::string& bytes) {
  return slip_from(std::as_bytes(std::span(bytes))).value_or(Slip());
}

// Returns 64 bits: a CRC32C of each half of the tensor's bytes.
uint64_t checksum_of(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.is_contiguous(),
                    "checksum() takes a contiguous tensor on the CPU");
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  const size_t bytes = tensor.nbytes(), half = bytes / 2;
  return uint64_t{checksum(data, half)} << 32 | checksum(data + half, bytes - half);
}

bool has_ended(const std::string& text) {
  Neighbours& neighbours = Process::get().neighbours();
  const Card card = Card::from_text(text, 0);
  return card.shares_host(neighbours.card()) && neighbours.is_gone(card.socket);
}

void bind_decree(py::module_& module) {
  using Request = Decree::Request;
  py::class_<Request>(module, "Request")
      .def("answer", [](const Request& self, const std::string& before) {
        const auto bytes = to_bytes(Decree::answer(witness_from(before), self));
        return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      });
  py::class_<Decree>(module, "Decree")
      .def(py::init([](int rank, int size, uint32_t epoch, const std::vector<Rank>& ranks,
                       uint64_t step, const std::string& extra) {
        Decision made{{}, step, extra};
        for (const Rank member : ranks) made.members.set(static_cast<size_t>(member));
        return Decree(rank, size, epoch, std::move(made));
      }))
      .def_property_readonly("rank", &Decree::rank)
      .def_property_readonly("size", &Decree::size)
      .def_property_readonly("epoch", [](const Decree& self) { return self.slip().epoch; })
      .def("enter",
           [](Decree& self, uint64_t decided, bool voted, const std::string& extra) {
             self.enter(decided, voted, extra, Clock::now());
           })
      .def("leave", &Decree::leave)
      .def("tick", [](Decree& self) { self.tick(Clock::now()); })
      .def("asks", &Decree::asks)
      .def("hear_witness",
           [](Decree& self, const std::string& bytes) {
             self.hear_witness(witness_from(bytes), Clock::now());
           })
      .def("is_working", [](const Decree& self,
                            int rank) { return self.heard(rank).state == Slip::State::kWorking; })
      .def("entered", &Decree::entered)
      .def("awaited", [](const Decree& self) { return ranks_in(self.awaited()); })
      .def("dead", [](const Decree& self) { return ranks_in(self.dead()); })
      .def("suspected", [](const Decree& self) { return ranks_in(self.suspected()); })
      .def("gone", [](const Decree& self) { return ranks_in(self.slip().gone); })
      .def("left_behind", &Decree::left_behind)
      .def("decision", [](const Decree& self) -> py::object {
        if (!self.decision()) return py::none();
        const auto& [members, step, extra] = *self.decision();
        return py::make_tuple(ranks_in(members), step, extra);
      });
}

}  // namespace

void bind_elastic(py::module_& module) {
  module.def("checksum", &checksum_of, py::arg("tensor"), NoGil());
  // `card` is how other processes know this one (transport/host.h). `has_ended` tells whether such
  // a process of this host has ended.
  module.def("card", [] { return Process::get().neighbours().card().to_text(); }, NoGil());
  module.def("has_ended", &has_ended, py::arg("card"), NoGil());
  bind_decree(module);
  py::class_<Links, std::shared_ptr<Links>>(module, "Links")
      .def(py::init([](const std::string& run) {
        return std::make_shared<Links>(Process::get().neighbours(), run);
      }))
      .def(
          "adopt",
          [](Links& self, const Backend& backend, const Decree& decree) {
            self.adopt(backend.group()->state().transport(), decree);
          },
          NoGil())
      .def("keep", &Links::keep, NoGil())
      .def("show", &Links::show, NoGil())
      .def("hear", &Links::hear, NoGil())
      .def("give_up", &Links::give_up, NoGil())
      .def("sleep", &Links::sleep, NoGil())
      .def("condition", &Links::condition, NoGil())
      .def("__len__", &Links::size);
}

}  // namespace ringcomm
