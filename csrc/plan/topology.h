// The word of a group's rank 0 to the others: the network's costs, and where `ringcomm tune` has
// measured every pair of hosts, their order and sites. With the hosts of a group's ranks it makes
// their reach. So all ranks of the group have the same.
#pragma once

#include "plan/select.h"

namespace ringcomm {

struct Topology {
  struct Host {
    std::string name;
    int site;
  };
  Costs costs;              // as a whole
  Costs near, far;          // inside a site, between sites
  std::vector<Host> hosts;  // along the ring; none: nobody measured them
};

// Reads the three numbers after the words alpha, beta and gamma. They may come twice more, of a
// site and between sites, and then name and site of each host: _network/costs.py writes it.
// "" means the defaults. Throws UsageError.
Topology parse_topology(const std::string& text);

// Names a host that the topology lacks, or that two of these hosts are called; "" if it knows all.
std::string stranger(const Topology& topology, const std::vector<std::string>& names);

// Lays the ranks out in the order of the topology, if it knows all hosts, and host by host, site by
// site. Rank r is on host host_of[r], which has the name names[host_of[r]].
Reach reach_of(const Topology& topology, const std::vector<int>& host_of,
               const std::vector<std::string>& names);

}  // namespace ringcomm
