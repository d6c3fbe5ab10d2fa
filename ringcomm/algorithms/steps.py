"""The plans of csrc/plan, one for each rank: what `ringcomm plan` prints and draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringcomm import _C
from ringcomm._network.costs import DEFAULT, Fabrics
from ringcomm._network.costs_file import Hosts, word_of

COLLECTIVES, ROOTED, SHARDED = _C.COLLECTIVES, _C.ROOTED, _C.SHARDED
# In the order of csrc/plan/plan.h, because the library names them by number.
VERBS = ("copy", "reduce", "signal", "wait")
SPACES = ("input", "output", "window", "inbox", "line")
LANES = ("data", "credit")

MOST_RANKS = 4096  # of a group: csrc/comm/create.cc


class Shape(NamedTuple):
    """The input of a planner, in the order that `_C.plan` takes. Lengths are bytes."""

    collective: int
    size: int  # ranks
    local: int  # of them on each host; all on one host read one another's memory
    element: int
    root: int
    bytes: int
    shards: list[int]
    send: list[int]
    recv: list[int]
    word: str  # of rank 0: the network's costs, and what is known of hosts: costs_file.word_of
    names: list[str]  # of the hosts in that word; none: they are not known there

    @property
    def name(self) -> str:
        return COLLECTIVES[self.collective]

    @property
    def hosts(self) -> int:
        return self.size // self.local

    @property
    def sites(self) -> list[int]:
        """How many hosts each site has."""
        found = self.word.split()[19::2] if self.names else []
        return [found.count(site) for site in dict.fromkeys(found)]

    @property
    def costs(self) -> str:
        """The costs by which ranks choose: between sites, where there are several."""
        words = self.word.split()
        first = 0 if not self.names else 12 if len(self.sites) > 1 else 6
        return " ".join(words[first : first + 6])

    @property
    def compared(self) -> int:
        """The bytes that the limits of the selection table are for: the message, or a shard."""
        return max(self.shards) if self.name in SHARDED else self.bytes


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
        return next((one.rank for one in self.targets if one.rank != rank), -1)

    def loaded(self, rank: int) -> Iterator[int]:
        """The ranks whose windows a step of `rank` reads."""
        return (one.rank for one in self.sources if one.space == "window" and one.rank != rank)


class Plan(NamedTuple):
    algorithm: str
    reason: str  # the row of the selection table that fits: "all_reduce, any size, mapped windows"
    steps: list[Step]


def shape_of(
    collective: str,
    ranks: int,
    size: int,
    hosts: int = 1,
    element: int = 4,
    root: int = 0,
    fabrics: Fabrics = DEFAULT,
    measured: Hosts | None = None,
) -> Shape:
    """Describe a message of `size` bytes, all shards together, among `ranks` on `hosts`.

    Elements have `element` bytes, and shards are as equal as they allow. Plans have the order and
    the sites of the hosts that are `measured`, if these are as many. In all_to_all `size` is
    what each rank sends. Raises ValueError where no group or message is like this.
    """
    if collective not in COLLECTIVES:
        raise ValueError(
            f"there is no collective {collective!r}: use one of {', '.join(COLLECTIVES)}"
        )
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"a group of {ranks} ranks: ringcomm takes 1 to {MOST_RANKS}")
    if hosts < 1 or ranks % hosts:
        raise ValueError(f"{ranks} ranks cannot be spread evenly over {hosts} hosts")
    if not 0 <= root < ranks:
        raise ValueError(f"rank {root} is not in a group of {ranks}, so it cannot be the root")
    if size % element:
        raise ValueError(f"{size} bytes are no whole number of elements of {element} bytes")
    each, more = divmod(size // element, ranks)
    shards = [(each + (rank < more)) * element for rank in range(ranks)]
    known = measured if measured and len(measured.names) == hosts > 1 else None
    whole = collective in ("all_reduce", "broadcast", "reduce")
    return Shape(
        COLLECTIVES.index(collective),
        ranks,
        ranks // hosts,
        element,
        root if collective in ROOTED else 0,
        size if whole else 0,
        shards if collective in SHARDED else [],
        shards if collective == "all_to_all" else [],
        [],
        word_of(fabrics, known),
        list(known.names) if known else [],
    )


def plan_of(shape: Shape, rank: int, algorithm: str | None = None) -> Plan:
    """Return the plan of one rank; `algorithm` None: by the table.

    Raises ValueError where the collective has no such algorithm.
    """
    if shape.send:
        shape = shape._replace(recv=[shape.send[rank]] * shape.size)
    name, reason, steps = _C.plan(shape, rank, algorithm)
    return Plan(name, reason, [one for step in steps if (one := step_of(step)).bytes or one.lane])


def step_of(found: tuple[int, int, int, int, int, list[tuple[int, int, int, int]]]) -> Step:
    verb, peer, lane, size, targets, refs = found
    operands = [Operand(SPACES[space], *rest) for space, *rest in refs]
    moves = VERBS[verb] in ("copy", "reduce")
    return Step(
        VERBS[verb],
        peer,
        "" if moves else LANES[lane],
        size if moves else 0,
        operands[:targets],
        operands[targets:],
    )


def plans_of(shape: Shape, algorithm: str | None = None) -> list[Plan]:
    """Return the plans of all ranks, by rank."""
    return [plan_of(shape, rank, algorithm) for rank in range(shape.size)]
