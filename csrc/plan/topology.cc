#include "plan/topology.h"

#include <cmath>
#include <numeric>
#include <set>

namespace ringcomm {
namespace {

Costs read_costs(std::istream& in) {
  Costs costs;
  const auto read = [&](const char* name, double& value) {
    std::string word;
    in >> word >> value;
    RINGCOMM_CHECK(in && word == name && std::isfinite(value) && value > 0,
                   "costs need a positive number of seconds after ", name);
  };
  read("alpha", costs.alpha);
  read("beta", costs.beta);
  read("gamma", costs.gamma);
  return costs;
}

// How many ranks there are of each kind, where they lie kind by kind, as many of each; else 1.
int ranks_per_kind(const std::vector<Rank>& order, const std::vector<int>& kinds) {
  const auto kind = [&](size_t place) { return kinds[static_cast<size_t>(order[place])]; };
  const size_t per_kind = order.size() / std::set(kinds.begin(), kinds.end()).size();
  for (size_t place = 0; place < order.size(); ++place) {
    const bool ends = (place + 1) % per_kind == 0;
    const bool changes = place + 1 == order.size() || kind(place) != kind(place + 1);
    if (ends != changes) return 1;
  }
  return static_cast<int>(per_kind);
}

}  // namespace

Topology parse_topology(const std::string& text) {
  Topology topology;
  if (text.empty()) return topology;
  TextReader in(text);
  topology.costs = topology.near = topology.far = read_costs(in);
  if ((in >> std::ws).eof()) return topology;
  topology.near = read_costs(in);
  topology.far = read_costs(in);
  for (Topology::Host host; in >> host.name >> host.site;) topology.hosts.push_back(host);
  return topology;
}

std::string stranger(const Topology& topology, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const auto known = std::ranges::count(topology.hosts, name, &Topology::Host::name);
    if (known != 1 || std::ranges::count(names, name) != 1) return name;
  }
  return "";
}

Reach reach_of(const Topology& topology, const std::vector<int>& host_of,
               const std::vector<std::string>& names) {
  Reach reach;
  reach.mapped = std::ranges::count(host_of, 0) == std::ssize(host_of);
  reach.costs = reach.near = topology.costs;
  if (reach.mapped) return reach;
  std::vector<Rank> order(host_of.size());
  std::iota(order.begin(), order.end(), 0);
  if (!topology.hosts.empty() && stranger(topology, names).empty()) {
    std::vector<int> places, sites;
    for (const int own : host_of) {
      const std::string& name = names.at(static_cast<size_t>(own));
      const auto host = std::ranges::find(topology.hosts, name, &Topology::Host::name);
      places.push_back(static_cast<int>(host - topology.hosts.begin()));
      sites.push_back(host->site);
    }
    std::ranges::stable_sort(order, {}, [&](Rank r) { return places[static_cast<size_t>(r)]; });
    const bool several = std::set(sites.begin(), sites.end()).size() > 1;
    reach.near = topology.near;
    reach.costs = several ? topology.far : topology.near;
    if (several) reach.site = ranks_per_kind(order, sites);
    if (!std::ranges::is_sorted(order)) {
      reach.order = std::make_shared<const std::vector<Rank>>(order);
    }
  }
  reach.local = ranks_per_kind(order, host_of);
  if (reach.site <= reach.local) reach.site = 1;  // a host each
  return reach;
}

}  // namespace ringcomm
