"""The evidence of one run: what ranks told of themselves, of their connections and of each pair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from ringcomm.tools.doctor.facts import UNKNOWN, Facts
from ringcomm.tools.doctor.measure import Pair
from ringcomm.tools.doctor.meeting import Reached
from ringcomm.tools.doctor.probe import Reachability


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
