"""What a simulation is told of the network, and one simulation."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ringcomm._network.costs import Fabrics
from ringcomm._network.costs_file import Hosts
from ringcomm.tools.plan.simulate import files, topology
from ringcomm.tools.plan.simulate.engine import Engine
from ringcomm.tools.plan.simulate.topology import Topology
from ringcomm.tools.plan.tables import GroupPlans

MOST_HOSTS = 256  # a simulation of more takes minutes


class Setting(NamedTuple):
    """What the arguments say of the network."""

    fabrics: Fabrics
    known: Hosts | None
    source: str  # of the costs
    topology: str

    def of(self, hosts: int) -> Topology:
        """Return the topology for so many hosts. Raises ValueError."""
        check_hosts(hosts)
        if self.topology.endswith(".json"):
            found = files.read(Path(self.topology), self.fabrics.network.alpha)
            if len(found.hosts) != hosts:
                has = len(found.hosts)
                raise ValueError(f"{self.topology} has {has} hosts, and the group {hosts}")
            return found
        return topology.named(self.topology, hosts, self.fabrics, self.known)


def check_hosts(hosts: int) -> None:
    """Raise ValueError where there are too many; it costs less than making their plans."""
    if hosts > MOST_HOSTS:
        raise ValueError(f"{hosts} hosts: a simulation takes at most {MOST_HOSTS}")


def simulate(group: GroupPlans, where: Topology, fabrics: Fabrics) -> tuple[float, Engine]:
    """Return the seconds of an operation, and what has happened in it. Raises ValueError."""
    engine = Engine(group.steps(), group.shape.local, fabrics, where)
    return engine.seconds(), engine
