"""Clocks of hosts, aligned through the operations themselves.

A collective that needs all ranks cannot end anywhere before the last rank has called it. So each
one bounds how far one host's clock may be ahead of another's, both ways. These are difference
constraints: shortest paths solve them (Cormen et al., chapter 22.4).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ringcomm._flight.records import GroupRecord, Operation
from ringcomm._text import show_seconds
from ringcomm.tools.trace.job import Group, Job, Shift

JUMP_NS = 100_000_000  # between clocks of a process: more is told
SAME_NS = 1_000_000_000  # clocks of a host that differ by less are one clock
MOST_TOLD = 8  # clocks, one by one
PAIRS = 2_000_000  # pairs of hosts, over all operations that are looked at
# No rank can end one of these before all have called it. Not so all_to_all, whose splits may be 0.
NEED_ALL = {"all_reduce", "all_gather", "reduce_scatter", "barrier"}
FROM_ROOT, TO_ROOT = {"broadcast", "scatter"}, {"reduce", "gather"}


@dataclass
class Moment:
    """One operation: when it was called and when it ended, by each clock.

    No time in `ended` lies before any in `called`.
    """

    ended: dict[str, int]  # by clock: the earliest
    called: dict[str, int]  # by clock: the latest

    @property
    def latest(self) -> int:
        return max(self.called.values())


def set_clocks(job: Job) -> None:
    """Give each process a clock of its host, and say where clocks jumped."""
    bases: dict[tuple[str, int], int] = {}
    for record in sorted(job.records, key=lambda record: record.steady_ns):
        base = record.wall_ns - record.steady_ns
        first = bases.setdefault((record.host, record.pid), base)
        if abs(base - first) > JUMP_NS:
            jump = show_seconds(abs(base - first) / 1e9)
            job.remarks.append(
                f"the wall clock of {record.host} jumped by {jump} "
                f"while rank {record.global_rank} ran: its times follow the steady clock"
            )
    for (host, pid), base in sorted(bases.items()):
        own = [name for name in job.bases if name.partition(" (")[0] == host]
        name = next((name for name in own if abs(job.bases[name] - base) < SAME_NS), None)
        if name is None:
            name = host if not own else f"{host} (clock {len(own) + 1})"
            job.bases[name] = base
            if own:
                job.remarks.append(
                    f"processes of host {host} have clocks that differ by seconds: either it was "
                    "set, or two machines have this name"
                )
        for record in job.records:
            if (record.host, record.pid) == (host, pid):
                job.clocks[id(record)] = name


def align(job: Job) -> None:
    """Shift the clocks so that no operation ends before its last call, and say by how much.

    Clocks drift apart over hours. Where the whole record contradicts itself, the newer half is
    taken, and so on.
    """
    names = list(job.bases)
    if len(names) < 2:
        return
    moments = sorted(moments_of(job), key=lambda moment: moment.latest)
    whole = len(moments)
    while moments:
        shifts = solve(names, moments)
        if shifts is not None:
            job.shifts = shifts
            break
        moments = moments[(len(moments) + 1) // 2 :]
    job.__dict__.pop("end", None)
    if whole and not moments:
        job.remarks.append("the clocks of the hosts contradict each other: times are theirs")
    elif len(moments) < whole:
        job.remarks.append(
            f"the clocks of the hosts drift: they agree on the newest {len(moments)} of {whole} "
            "operations"
        )
    told = [shift_text(name, names[0], shift) for name, shift in job.shifts.items()]
    if len(told) > MOST_TOLD:
        most = max(job.shifts.values(), key=lambda shift: abs(shift.ns))
        told = [
            f"the clocks of {len(told)} hosts are shifted by at most {abs(most.ns) / 1e9:.6f} s, "
            f"to that of {names[0]}: --perfetto writes each"
        ]
    job.remarks += told


def shift_text(name: str, first: str, shift: Shift) -> str:
    """Say what a clock is shifted by; "" for the first, which others follow."""
    if name == first:
        return f"the clock of {name} stays, and those of other hosts follow it"
    low = "" if shift.lowest is None else f"at least {shift.lowest / 1e9:+.6f} s"
    high = "" if shift.highest is None else f"at most {shift.highest / 1e9:+.6f} s"
    bounds = " and ".join(word for word in (low, high) if word) or "any shift"
    return f"the clock of {name} is shifted by {shift.ns / 1e9:+.6f} s: operations allow {bounds}"


def moments_of(job: Job) -> Iterator[Moment]:
    for group in job.groups:
        for sequence, calls in group.calls.items():
            if sequence not in group.differing:
                yield from constraints(job, group, calls)


def constraints(job: Job, group: Group, calls: dict[int, Operation]) -> Iterator[Moment]:
    """Yield what a collective says that all ranks called alike, or nothing."""
    first = next(iter(calls.values()))
    sized = first.collective == "barrier" or (first.elements >= group.size and not first.splits)
    root = first.root
    every = [(group.records[rank], operation) for rank, operation in calls.items()]
    of_root = [pair for pair in every if pair[0].rank == root]
    if first.collective in NEED_ALL and sized:
        yield from moment(job, every, every)
    elif first.collective in FROM_ROOT and sized:
        yield from moment(job, every, of_root)
    elif first.collective in TO_ROOT and sized:
        yield from moment(job, of_root, every)


Pairs = Iterable[tuple[GroupRecord, Operation]]


def moment(job: Job, enders: Pairs, callers: Pairs) -> Iterator[Moment]:
    ended: dict[str, int] = {}
    called: dict[str, int] = {}
    for record, operation in enders:
        if operation.is_done and operation.ended_ns:
            name = job.clocks[id(record)]
            at = operation.ended_ns + job.bases[name]
            ended[name] = min(ended.get(name, at), at)
    for record, operation in callers:
        if operation.called_ns:
            name = job.clocks[id(record)]
            at = operation.called_ns + job.bases[name]
            called[name] = max(called.get(name, at), at)
    if ended and called and len({*ended, *called}) > 1:
        yield Moment(ended, called)


def solve(names: list[str], moments: list[Moment]) -> dict[str, Shift] | None:
    """Return a shift of each clock that fits all operations, or None where none does.

    The first clock stays, and clocks that fit already stay all. Else operations are taken to end
    everywhere at once. If even that does not fit, each shift is the middle of its bounds: the
    middle of two solutions is one too.
    """
    edges = edges_of(names, moments)
    first = names[0]
    guesses = [dict.fromkeys(names, 0.0), by_ends(names, moments)]
    middle = next((guess for guess in guesses if guess and fits(guess, edges)), None)
    infinite = float("inf")
    start = {name: 0.0 if name == first else infinite for name in names}
    high = shortest(edges, start)
    low = shortest({(b, a): most for (a, b), most in edges.items()}, start)
    every = shortest(edges, dict.fromkeys(names, 0.0))
    if high is None or low is None or every is None:
        return None
    if middle is None and infinite in {*high.values(), *low.values()}:
        middle = {name: every[name] - every[first] for name in names}
    elif middle is None:
        middle = {name: (high[name] - low[name]) / 2 for name in names}
    return {
        name: Shift(
            round(middle[name]),
            None if low[name] == infinite else -round(low[name]),
            None if high[name] == infinite else round(high[name]),
        )
        for name in names
    }


def by_ends(names: list[str], moments: list[Moment]) -> dict[str, float] | None:
    """Return the shifts by which operations end everywhere at once, at the median."""
    first = names[0]
    gaps: dict[str, list[int]] = {name: [] for name in names}
    for moment in moments:
        for name, ended in moment.ended.items():
            if first in moment.ended:
                gaps[name].append(moment.ended[first] - ended)
    if not all(gaps.values()):
        return None
    return {name: float(statistics.median(own)) for name, own in gaps.items()}


def fits(shifts: dict[str, float], edges: dict[tuple[str, str], float]) -> bool:
    return all(shifts[b] - shifts[a] <= most for (a, b), most in edges.items())


def edges_of(names: list[str], moments: list[Moment]) -> dict[tuple[str, str], float]:
    """Map (a, b) to the most by which b's shift may exceed a's."""
    edges: dict[tuple[str, str], float] = {}
    # The tightest operations are those that took least; more of them would take too long.
    most = max(PAIRS // len(names) ** 2, 64)
    tight = sorted(moments, key=lambda moment: min(moment.ended.values()) - moment.latest)
    for moment in tight[:most]:
        for a, ended in moment.ended.items():
            for b, called in moment.called.items():
                if a != b:
                    edges[a, b] = min(edges.get((a, b), ended - called), ended - called)
    return edges


def shortest(
    edges: dict[tuple[str, str], float], start: dict[str, float]
) -> dict[str, float] | None:
    """Return the shortest ways from the start (Bellman and Ford); None: the edges contradict."""
    ways = dict(start)
    for _ in range(len(ways)):
        changed = False
        for (a, b), length in edges.items():
            if ways[a] + length < ways[b]:
                ways[b] = ways[a] + length
                changed = True
        if not changed:
            return ways
    return None
