"""Many seeded walks of matching.py: the best is kept, as `ringcomm simulate` counts the time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from ringcomm._network.costs import Fabrics
from ringcomm._network.costs_file import Hosts
from ringcomm.algorithms.program import AlgorithmError
from ringcomm.algorithms.proof import given_of
from ringcomm.algorithms.steps import shape_of
from ringcomm.options import ALGORITHMS
from ringcomm.tools.plan.by_hand import of_hand
from ringcomm.tools.plan.search import matching, writing
from ringcomm.tools.plan.search.matching import Step
from ringcomm.tools.plan.search.writing import Form
from ringcomm.tools.plan.simulate.engine import Engine
from ringcomm.tools.plan.simulate.setting import simulate
from ringcomm.tools.plan.simulate.topology import Topology
from ringcomm.tools.plan.source import plans_of
from ringcomm.tools.plan.tables import GroupPlans

WAYS = {
    "all_gather": matching.spread,
    "broadcast": matching.spread,
    "reduce_scatter": matching.collect,
    "all_reduce": matching.both,
}
# More chunks must be this much faster: what a message costs a core is not in the simulation.
WORTH = 0.98
MOST_HOPS = 20_000  # of a plan: one with more takes minutes to make and prove


class Task(NamedTuple):
    """What is searched: a plan for messages of so many bytes, all shards together.

    `known` are the hosts that `ringcomm tune` has measured: the library's plans have their order.
    """

    collective: str
    bytes: int
    root: int
    topology: Topology
    fabrics: Fabrics
    known: Hosts | None = None

    @property
    def ranks(self) -> int:
        return len(self.topology.hosts)


class Found(NamedTuple):
    """A plan, its seconds by simulation, and the try that it came from, counted from 1."""

    form: Form
    steps: Sequence[Step]
    seconds: float
    engine: Engine
    number: int


def search(task: Task, parts: Sequence[int], tries: int, seed: int) -> Found:
    """Return the fastest of so many tries with each number of parts; of equal ones the first.

    `parts` is into how many chunks each rank's part of the message is cut. The same seed finds the
    same. Raises ValueError where no try has a plan, or it would be too long.
    """
    check(task, max(parts))
    best: Found | None = None
    for count in sorted(parts):
        found = best_with(task, count, tries, seed)
        if best is None or found.seconds < best.seconds * WORTH:
            best = found
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
            seconds, engine = simulate(made(task, form, steps), task.topology, task.fabrics)
        except AlgorithmError as error:
            wrong = str(error)
            continue
        if best is None or seconds < best.seconds:
            best = Found(form, steps, seconds, engine, number)
    if best is None:
        raise ValueError(f"no try of {task.collective} has a plan: {wrong}")
    return best


def check(task: Task, parts: int) -> None:
    if task.collective not in WAYS:
        raise ValueError(f"{task.collective} is not searched: use one of {', '.join(WAYS)}")
    given_of(task.collective, task.ranks, task.bytes, 4, task.root, 1, False)
    hops = task.ranks * (task.ranks - 1) * parts
    if hops > MOST_HOPS:
        raise ValueError(
            f"{parts} chunks of {task.ranks} parts take {hops:,} messages, and a search at most "
            f"{MOST_HOPS:,}: use fewer --chunks"
        )


def made(task: Task, form: Form, steps: Sequence[Step]) -> GroupPlans:
    """Return the plans of all ranks. Raises AlgorithmError."""
    function = writing.load(writing.text_of(form, steps, "A try."), form)
    shape = shape_of(task.collective, task.ranks, task.bytes, task.ranks, 4, task.root)
    return of_hand(shape, function)


class Other(NamedTuple):
    """The library's own algorithm, and its seconds by simulation."""

    name: str
    seconds: float


def library(task: Task) -> list[Other]:
    """Return the library's algorithms for it, the fastest first."""
    found = []
    for name in ALGORITHMS:
        try:
            group = plans_of(
                *(task.collective, task.ranks, task.bytes, task.ranks, name, task.root),
                *(task.fabrics, task.known),
            )
        except ValueError:
            continue  # the collective has no such algorithm, or not between hosts
        found.append(Other(name, simulate(group, task.topology, task.fabrics)[0]))
    return sorted(found, key=lambda one: (one.seconds, one.name))
