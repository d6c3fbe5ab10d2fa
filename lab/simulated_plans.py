"""How long the library's plans take on a switch, by the simulation."""

from __future__ import annotations

from ringcomm._network.costs import Costs, Fabrics, Network
from ringcomm.algorithms.call import call_of
from ringcomm.tools.plan.simulate import topology
from ringcomm.tools.plan.simulate.engine import simulate
from ringcomm.tools.plan.source import plans_of

NOTHING = Costs(1e-30, 1e-30, 1e-30)  # a rate is one byte over beta


def seconds(
    collective: str,
    algorithm: str | None,
    size: int,
    ranks: int,
    hosts: int,
    network: Costs,
    memory: Costs = NOTHING,
) -> float:
    """Return the seconds of a message of `size` bytes, all shards together; None: by the table."""
    known = Network(Fabrics(memory, network))
    group = plans_of(call_of(collective, ranks, size, hosts), algorithm, known)
    return simulate(group, topology.named("switch", hosts, known), known.fabrics).seconds
