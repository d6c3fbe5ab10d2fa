"""Many seeded walks of matching.py: the best is kept, by the time of `ringcomm plan simulate`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from ringcomm._network.costs import Network
from ringcomm.algorithms.call import Call, call_of
from ringcomm.algorithms.program import AlgorithmError
from ringcomm.algorithms.proof import check_by_hand
from ringcomm.options import ALGORITHMS
from ringcomm.tools.plan.search import matching, writing
from ringcomm.tools.plan.search.matching import Step
from ringcomm.tools.plan.search.writing import Form
from ringcomm.tools.plan.simulate.engine import Engine, simulate
from ringcomm.tools.plan.simulate.topology import Topology
from ringcomm.tools.plan.source import plans_of

WAYS = {
    "all_gather": matching.spread,
    "broadcast": matching.spread,
    "reduce_scatter": matching.collect,
    "all_reduce": matching.both,
}
# More chunks must be this much faster: the simulation leaves out what a message costs a core.
WORTH = 0.98
MOST_HOPS = 20_000  # in a plan: one with more takes minutes to make and prove


class Task(NamedTuple):
    """The task of a search: a plan for messages of so many bytes, all shards together."""

    collective: str
    bytes: int
    root: int
    topology: Topology
    network: Network

    @property
    def ranks(self) -> int:
        return len(self.topology.hosts)

    @property
    def call(self) -> Call:
        """The call. Raises ValueError where there is none such."""
        return call_of(self.collective, self.ranks, self.bytes, self.ranks, root=self.root)


class Found(NamedTuple):
    """A plan, its simulation, and the try that it came from, counted from 1."""

    form: Form
    steps: Sequence[Step]
    engine: Engine
    number: int

    @property
    def seconds(self) -> float:
        return self.engine.seconds


def search(task: Task, parts: Sequence[int], tries: int, seed: int) -> Found:
    """Return the fastest of so many tries with each number of parts; of equal ones the first.

    `parts` is into how many chunks each rank's part of the message is cut. The same seed finds the
    same. Raises ValueError where no try has a plan, or it would be too long.
    """
    check(task, max(parts))
    best: Found | None = None
    for count in sorted(parts):
        fastest = best_with(task, count, tries, seed)
        if best is None or fastest.seconds < best.seconds * WORTH:
            best = fastest
    assert best
    return best


def best_with(task: Task, parts: int, tries: int, seed: int) -> Found:
    """Return the fastest try with so many parts. Raises ValueError where no try has a plan."""
    form = Form(task.collective, task.ranks, parts, task.root)
    size = max(1.0, task.bytes / (task.ranks * parts))
    best: Found | None = None
    seen: set[tuple[Step, ...]] = set()
    wrong = ""
    for number in range(1, tries + 1):
        chance = random.Random(f"{seed} {parts} {number}")
        steps = tuple(WAYS[task.collective](task.topology, form.owners, size, chance))
        if steps in seen:
            continue
        seen.add(steps)
        try:
            function = writing.load(writing.text_of(form, steps, "A try."), form)
            group = plans_of(task.call, function)
            engine = simulate(group, task.topology, task.network.fabrics)
        except AlgorithmError as error:
            wrong = str(error)
            continue
        if best is None or engine.seconds < best.seconds:
            best = Found(form, steps, engine, number)
    if best is None:
        raise ValueError(f"no try of {task.collective} has a plan: {wrong}")
    return best


def check(task: Task, parts: int) -> None:
    if task.collective not in WAYS:
        raise ValueError(f"{task.collective} is not searched: use one of {', '.join(WAYS)}")
    check_by_hand(task.call)
    hops = task.ranks * (task.ranks - 1) * parts
    if hops > MOST_HOPS:
        raise ValueError(
            f"{parts} chunks of {task.ranks} parts take {hops:,} messages, and a search at most "
            f"{MOST_HOPS:,}: use fewer --chunks"
        )


class Other(NamedTuple):
    """The library's own algorithm, and its seconds by simulation."""

    name: str
    seconds: float


def library(task: Task) -> list[Other]:
    """Return the library's algorithms for it, the fastest first."""
    others = []
    for name in ALGORITHMS:
        try:
            group = plans_of(task.call, name, task.network)
        except ValueError:
            continue  # the collective has no such algorithm, or not between hosts
        run = simulate(group, task.topology, task.network.fabrics)
        others.append(Other(name, run.seconds))
    return sorted(others, key=lambda other: (other.seconds, other.name))
