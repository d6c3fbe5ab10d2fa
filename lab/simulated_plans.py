"""Plans between hosts, their bytes and their times: see ringcomm/tools/plan/times.py."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ringcomm._network.costs import Costs, Fabrics
from ringcomm.algorithms import steps
from ringcomm.algorithms.steps import Step
from ringcomm.tools.plan.times import Simulation

NOTHING = Costs(0, 0, 0)


class Shape(NamedTuple):
    """A message of `bytes`, all shards together, in memory as it is between hosts."""

    collective: str
    bytes: int
    size: int  # ranks
    local: int = 1


@functools.lru_cache(maxsize=64)
def steps_of(shape: Shape, algorithm: str) -> list[list[Step]]:
    """Return the steps of each rank."""
    whole = steps.shape_of(shape.collective, shape.size, shape.bytes, shape.size // shape.local)
    return [plan.steps for plan in steps.plans_of(whole, algorithm)]


def busiest_link(shape: Shape, algorithm: str) -> int:
    """Bytes that one rank sends, or that it receives: the most there are."""
    sent, received = [0] * shape.size, [0] * shape.size
    for rank, own in enumerate(steps_of(shape, algorithm)):
        for step in own:
            if (to := step.receiver(rank)) >= 0:
                sent[rank] += step.bytes
                received[to] += step.bytes
    return max(sent + received)


def seconds(shape: Shape, algorithm: str, network: Costs, memory: Costs = NOTHING) -> float:
    run = Simulation(steps_of(shape, algorithm), shape.local, Fabrics(memory, network))
    return run.seconds()
