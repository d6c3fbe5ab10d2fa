"""What is slow though nothing fails: stragglers, and peers whose network stood still."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from ringcomm.tools.trace.clocks import NEED_ALL
from ringcomm.tools.trace.findings import Finding, Kind, where
from ringcomm.tools.trace.job import Calls, Group, Job, clock_text, ranks_text
from ringcomm.tools.words import show_seconds

FEWEST = 10  # collectives, for a verdict on stragglers
OFTEN = 0.75  # of the collectives a straggler calls last
SHARE = 0.02  # of the time, that the others lose for it
STALL_NS = 200_000_000  # a wait of the network that is told, at least
TIMES = 20  # and so many times the median


@dataclass
class Lateness:
    """How late one rank calls, over the collectives of a group; ns."""

    last: int = 0  # collectives that it called last
    lost: int = 0  # how much later than the last of the others, in total
    late: list[int] | None = None  # after the first rank


def called(job: Job, group: Group, calls: Calls) -> dict[int, int]:
    return {
        rank: job.called(group.records[rank], operation)
        for rank, operation in calls.items()
        if operation.called_ns
    }


def lateness(job: Job, group: Group) -> tuple[dict[int, Lateness], int, int]:
    """Return it by rank, the number of collectives, and the time from the first to the last."""
    found = {rank: Lateness(late=[]) for rank in range(group.size)}
    ends: list[int] = []
    count = 0
    clocks = len({job.clocks[id(record)] for record in group.records.values()})
    for calls in group.calls.values():
        times = called(job, group, calls)
        if len(times) < group.size or group.size < 2:
            continue
        ends.append(max(times.values()))
        times = by_duration(calls) if clocks > 1 else times
        if not times:
            continue
        count += 1
        order = sorted(times, key=lambda rank: times[rank])
        found[order[-1]].last += 1
        found[order[-1]].lost += times[order[-1]] - times[order[-2]]
        for rank, at in times.items():
            late = found[rank].late
            if late is not None:
                late.append(at - times[order[0]])
    return found, count, ends[-1] - ends[0] if ends else 0


def by_duration(calls: Calls) -> dict[int, int]:
    """Return when each rank called, before the common end: this needs no clock of other hosts.

    A collective that needs all ranks ends about everywhere at once. Nothing for others.
    """
    found = {}
    for rank, operation in calls.items():
        if operation.collective not in NEED_ALL or not operation.is_done:
            return {}
        if operation.called_ns and operation.ended_ns:
            found[rank] = operation.called_ns - operation.ended_ns
    return found if len(found) == len(calls) else {}


def stragglers(job: Job) -> Iterator[Finding]:
    for group in job.groups:
        found, count, span = lateness(job, group)
        if count < FEWEST:
            continue
        rank = max(found, key=lambda rank: found[rank].last)
        worst = found[rank]
        margin = worst.lost // max(worst.last, 1)
        if worst.last < OFTEN * count or worst.lost < SHARE * span:
            continue
        rows = [
            (
                str(group.ranks[one]), group.records[one].host,
                f"{late.last} of {count}", late_text(late),
            )
            for one, late in sorted(found.items(), key=lambda pair: -pair[1].last)[:8]
        ]  # fmt: skip
        yield Finding(
            Kind.STRAGGLER,
            f"rank {group.ranks[rank]} is a straggler: it was the last to call {worst.last} of "
            f"{count} collectives{where(job, group)}, {show_seconds(margin / 1e9)} after the next "
            f"rank on average; the others lost {worst.lost / max(span, 1):.0%} of the time",
            ("rank", "host", "was last in", "calls after the first rank"),
            rows,
        )


def late_text(late: Lateness) -> str:
    if not late.late:
        return "-"
    middle = statistics.median(late.late)
    return f"{show_seconds(middle / 1e9)} later" if middle >= 1000 else "no later"


@dataclass
class Stall:
    """A wait of one rank for a peer that had called already."""

    group: Group
    rank: int
    peer: int
    ns: int
    name: str
    at: int
    resent: int


def stalls(job: Job) -> list[Stall]:
    """Return the long waits that no late call explains."""
    found = []
    for group in job.groups:
        typical: list[int] = []
        own: list[Stall] = []
        for calls in group.calls.values():
            times = called(job, group, calls)
            if len(times) < group.size:
                continue
            for rank, operation in calls.items():
                peer = operation.longest_peer
                start = times.get(rank)
                if peer is None or start is None:
                    continue
                # A wait for another's late call may pass through any peer.
                late = max(max(times.values()) - start, 0)
                rest = operation.longest_ns - late
                typical.append(max(rest, 0))
                if rest > STALL_NS:
                    own.append(
                        Stall(group, rank, peer, rest, operation.name, start, operation.resent)
                    )
        middle = statistics.median(typical) if typical else 0
        found += [stall for stall in own if stall.ns > TIMES * middle]
    return found


def networks(job: Job) -> Iterator[Finding]:
    """Name the peer for which others waited though it had called."""
    some = stalls(job)
    if not some:
        return
    hosts = job.hosts()
    worst = max(some, key=lambda stall: stall.ns)
    rank, peer = worst.group.ranks[worst.rank], worst.group.ranks[worst.peer]
    resent = sum(stall.resent for stall in some)
    frames = f"; {resent} frames were sent again" if resent else ""
    what = (
        f"the network between {hosts[rank]} and {hosts[peer]}"
        if peer in hosts and hosts[peer] != hosts[rank]
        else f"what {ranks_text([peer])} sends"
    )
    rows = [
        (
            str(stall.group.ranks[stall.rank]), str(stall.group.ranks[stall.peer]),
            f"{stall.name}{where(job, stall.group)}", clock_text(stall.at, 3),
            show_seconds(stall.ns / 1e9), str(stall.resent),
        )
        for stall in sorted(some, key=lambda stall: -stall.ns)[:12]
    ]  # fmt: skip
    yield Finding(
        Kind.NETWORK,
        f"{what} stood still: rank {rank} waited {show_seconds(worst.ns / 1e9)} for rank {peer} in "
        f"{worst.name}{where(job, worst.group)}, though all ranks had called it{frames}",
        ("rank", "waited for", "in", "called at", "wait", "frames sent again"),
        rows,
    )
