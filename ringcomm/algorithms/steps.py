"""The plans of csrc/plan, one for each rank, as steps that follow one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringcomm import _planner
from ringcomm._network.costs import Network
from ringcomm.algorithms.call import Call

VERBS, SPACES, LANES = _planner.VERBS, _planner.SPACES, _planner.LANES  # told by number

DEFAULT_NETWORK = Network()


class Operand(NamedTuple):
    """Bytes from `offset` on in memory of `rank`, which `writer` writes."""

    space: str
    rank: int
    writer: int
    offset: int


class Step(NamedTuple):
    """A copy or reduce of `bytes`, from `sources` to `targets`; or a signal to `peer`, or a wait.

    `peer` is -1, and the lane empty, where bytes are moved. `bytes` counts one operand.
    """

    verb: str
    peer: int
    lane: str
    bytes: int
    targets: list[Operand]
    sources: list[Operand]

    def receiver(self, rank: int) -> int:
        """Return the rank whose inbox or line a step of `rank` writes to; -1: none."""
        return next((target.rank for target in self.targets if target.rank != rank), -1)

    def loaded(self, rank: int) -> Iterator[int]:
        """Return the ranks whose windows a step of `rank` reads."""
        return (s.rank for s in self.sources if s.space == "window" and s.rank != rank)


class Plan(NamedTuple):
    algorithm: str
    reason: str  # the row of the selection table that fits: "all_reduce, any size, mapped windows"
    steps: list[Step]


class GroupPlans(NamedTuple):
    """The plans of all ranks: `steps` by rank."""

    call: Call
    algorithm: str
    steps: list[list[Step]]


def plan_of(
    call: Call, rank: int, algorithm: str | None = None, network: Network = DEFAULT_NETWORK
) -> Plan:
    """Return the plan of one rank; `algorithm` None: by the table.

    It has the order and the sites of the network's hosts, where these are as many. Raises
    ValueError where the collective has no such algorithm.
    """
    if call.send:
        call = call._replace(recv=[call.send[rank]] * call.ranks)
    name, reason, steps = _planner.plan(call, *network.word(call.hosts), rank, algorithm)
    return Plan(name, reason, done(steps))


def plans_of(
    call: Call, algorithm: str | None = None, network: Network = DEFAULT_NETWORK
) -> GroupPlans:
    """Return the plans of all ranks. Raises as `plan_of` does."""
    made = [plan_of(call, rank, algorithm, network) for rank in range(call.ranks)]
    return GroupPlans(call, made[0].algorithm, [plan.steps for plan in made])


Told = list[tuple[int, int, int, int, int, list[tuple[int, int, int, int]]]]


def done(told: Told) -> list[Step]:
    """Return the steps that the library tells, without copies of nothing."""
    steps = []
    for verb, peer, lane, size, targets, refs in told:
        if VERBS[verb] in ("signal", "wait"):
            steps.append(Step(VERBS[verb], peer, LANES[lane], 0, [], []))
        elif size:
            operands = [Operand(SPACES[space], *rest) for space, *rest in refs]
            steps.append(Step(VERBS[verb], peer, "", size, operands[:targets], operands[targets:]))
    return steps
