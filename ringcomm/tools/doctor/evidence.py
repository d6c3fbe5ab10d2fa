"""The evidence of one run: what ranks told of themselves, of their connections and of each pair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from ringcomm.tools import load
from ringcomm.tools.doctor import turns
from ringcomm.tools.doctor.facts import UNKNOWN, Facts
from ringcomm.tools.doctor.measure import Pair
from ringcomm.tools.doctor.meeting import Reached
from ringcomm.tools.doctor.probe import Reachability
from ringcomm.tools.load import Span

TOO_FEW, BUSY = "too few cores", "others were busy"


@dataclass
class Evidence:
    """Everything that one run found: findings.py judges it.

    `links` and `pairs` are by (from, to) and by the two ranks; `closed` has the answer of
    a port without a listener, by (from, address).
    """

    world: int
    leader: int
    ranks: dict[int, Facts]
    reached: Reached = field(default_factory=Reached)
    own_store: bool = False  # rank 0 serves it
    met: bool = False  # this rank has the store
    links: dict[tuple[int, int], Reachability] = field(default_factory=dict)
    closed: dict[tuple[int, str], str] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)  # of CPU time, while each rank measured
    lost: dict[int, str] = field(default_factory=dict)  # came, and fell silent: in which stage
    alone: bool = False  # no launcher
    excluded: bool = False  # this rank came after the roll
    seconds: float = 0.0  # that the examination took
    broken: str = ""  # why the examination ended early
    silent: bool = False  # it ended because the store did not answer any more
    called: bool = False  # it is known who came


def machines(evidence: Evidence) -> dict[tuple[str, str, int], list[int]]:
    """Return the ranks of each host."""
    hosts: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for rank, facts in sorted(evidence.ranks.items()):
        hosts[facts.machine].append(rank)
    return hosts


def span_of(evidence: Evidence, ranks: list[int]) -> Span:
    """Return what happened on a host while its ranks measured: what is theirs is of all of them."""
    told = [evidence.spans[rank] for rank in ranks if rank in evidence.spans]
    if len(told) < len(ranks):
        return Span(0.0, None)
    longest = max(told, key=lambda span: span.seconds)
    return Span(longest.seconds, longest.busy, sum(span.own for span in told))


def share_of(evidence: Evidence, ranks: list[int]) -> float | None:
    """Return what others used of the cores that a host's ranks need; None: unknown."""
    cores = evidence.ranks[ranks[0]].cores
    return span_of(evidence, ranks).share(min(len(ranks), cores))


def doubt(evidence: Evidence, pair: tuple[int, int]) -> str:
    """Return why the figures of two ranks cannot be trusted; "" where they can."""
    every = [*machines(evidence).values()]
    hosts = [ranks for ranks in every if {*ranks} & {*pair}]
    in_turn = turns.take_turns(every)
    for ranks in hosts:
        at_once = len({*ranks} & {*pair}) if in_turn else len(ranks)
        if 0 < evidence.ranks[ranks[0]].cores < at_once:
            return TOO_FEW
    busy = any(load.in_doubt(share_of(evidence, ranks)) for ranks in hosts)
    return BUSY if busy else ""


def by_value(evidence: Evidence, value: Callable[[Facts], str]) -> dict[str, list[int]]:
    """Return the ranks by what they have; those without it are left out."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, facts in sorted(evidence.ranks.items()):
        if value(facts):
            groups[value(facts)].append(rank)
    return groups


def shares_memory(mine: Facts, theirs: Facts) -> str:
    """Return why two ranks do not share memory by what they tell; "" where they should.

    The rule is `_C.same_host`'s, in words, and here because a library that does not load is
    examined, too.
    """
    if mine.tcp or theirs.tcp:
        return "RINGCOMM_TRANSPORT=tcp"
    if mine.machine != theirs.machine:
        for facts in (mine, theirs):
            if UNKNOWN in (facts.boot_id, facts.network):
                return f"rank {facts.rank} cannot read its boot id or network namespace"
        if mine.boot_id == theirs.boot_id:
            return "two network namespaces of one machine"
        return "two hosts"
    if mine.user != theirs.user:
        return f"users {mine.user} and {theirs.user}"
    return ""


def asker(links: dict[tuple[int, int], Reachability], low: int, high: int) -> tuple[int, int]:
    """Return which rank of a pair has the connection to measure, and its peer; -1: neither."""
    forth, back = links.get((low, high)), links.get((high, low))
    if forth and (forth.memory == "shared" or forth.reaches):
        return low, high
    if back and back.reaches:
        return high, low
    return -1, -1
