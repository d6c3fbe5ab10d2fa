"""What is slow though nothing fails: straggling ranks and hosts, and networks that stood still."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from ringcomm._text import ranks_text, show_seconds, spans
from ringcomm.tools.trace.clocks import NEED_ALL
from ringcomm.tools.trace.findings import Finding, Kind, where
from ringcomm.tools.trace.job import Calls, Group, Job, clock_text

FEWEST = 10  # collectives, for a verdict on stragglers
OFTEN = 0.75  # of the collectives a straggler calls last
SHARE = 0.02  # of the time, that the others lose for it
STALL_NS = 200_000_000  # a wait of the network that is told, at least
TIMES = 20  # and so many times the median
SHOWN = 8  # ranks or hosts of a table of stragglers


@dataclass
class Lateness:
    """How late one rank, or all ranks of one host, call over the collectives of a group; ns."""

    last: int = 0  # collectives that it called last
    lost: int = 0  # how much later than the last of the others, in total
    late: list[int] = field(default_factory=list)  # after the first rank


def offsets(job: Job, group: Group) -> dict[int, int]:
    """Return by rank what leads from its steady clock to the common one; ns."""
    return {rank: job.at(record, 0) for rank, record in group.records.items()}


def called(calls: Calls, add: dict[int, int]) -> dict[int, int]:
    """Return by rank when it called; `add`: offsets()."""
    return {rank: one.called_ns + add[rank] for rank, one in calls.items() if one.called_ns}


Times = dict[int, int]  # by the group's ranks: when each called; ns


def times_of(job: Job, group: Group) -> tuple[list[Times], int]:
    """Return the times of each collective that all ranks called, and from the first to the last."""
    found: list[Times] = []
    ends: list[int] = []
    add = offsets(job, group)
    clocks = len({job.clocks[id(record)] for record in group.records.values()})
    for calls in group.calls.values():
        times = called(calls, add)
        if len(times) < group.size or group.size < 2:
            continue
        ends.append(max(times.values()))
        times = by_duration(calls) if clocks > 1 else times
        if times:
            found.append(times)
    return found, ends[-1] - ends[0] if ends else 0


def lateness(every: list[Times], members: list[list[int]]) -> list[Lateness]:
    """Return how late each of some sets of ranks calls.

    A set is last where the first of its ranks calls after the last of all others.
    """
    found = [Lateness() for _ in members]
    for times in every:
        first = min(times.values())
        order = sorted(times, key=lambda rank: times[rank])
        for one, ranks in zip(found, members, strict=True):
            begins = min(map(times.__getitem__, ranks))
            one.late.append(begins - first)
            if set(order[-len(ranks) :]).issubset(ranks):
                one.last += 1
                one.lost += begins - times[order[-len(ranks) - 1]]
    return found


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
    """Name the host of each group whose ranks are all late, or the rank that is."""
    for group in job.groups:
        every, span = times_of(job, group)
        if len(every) < FEWEST:
            continue
        ranks = lateness(every, [[rank] for rank in range(group.size)])
        names, members = hosts_of(group)
        hosts = lateness(every, members) if names else []
        rank, host = worst(ranks, len(every), span), worst(hosts, len(every), span)
        if host is not None and len(members[host]) < 2:
            host = None
        if host is not None and (rank is None or hosts[host].lost >= ranks[rank].lost):
            yield straggling_host(job, group, host, hosts, span)
        elif rank is not None:
            yield straggling_rank(job, group, rank, ranks, span)


def hosts_of(group: Group) -> tuple[list[str], list[list[int]]]:
    """Return the hosts of a group and their ranks; nothing where one of both says all."""
    found: dict[str, list[int]] = {}
    for rank, record in sorted(group.records.items()):
        found.setdefault(record.host, []).append(rank)
    if not 1 < len(found) < group.size:
        return [], []
    return list(found), list(found.values())


def worst(found: list[Lateness], count: int, span: int) -> int | None:
    """Return the number of the one that is last so often that it costs time, or None."""
    at = max(range(len(found)), key=lambda one: found[one].last, default=None)
    if at is None or found[at].last < OFTEN * count or found[at].lost < SHARE * span:
        return None
    return at


def cost(one: Lateness, span: int) -> tuple[str, str]:
    """Return how late it is on average, and the share of the time that it costs."""
    return show_seconds(one.lost // max(one.last, 1) / 1e9), f"{one.lost / max(span, 1):.0%}"


def straggling_rank(job: Job, group: Group, rank: int, ranks: list[Lateness], span: int) -> Finding:
    count = len(ranks[rank].late)
    late, share = cost(ranks[rank], span)
    order = sorted(range(group.size), key=lambda one: -ranks[one].last)
    rows = [
        (
            str(group.ranks[one]), group.records[one].host,
            f"{ranks[one].last} of {count}", late_text(ranks[one]),
        )
        for one in order[:SHOWN]
    ]  # fmt: skip
    return Finding(
        Kind.STRAGGLER,
        f"rank {group.ranks[rank]} is a straggler: it was the last to call {ranks[rank].last} of "
        f"{count} collectives{where(job, group)}, {late} after the next rank on average; the "
        f"others lost {share} of the time",
        ("rank", "host", "was last in", "calls after the first rank"),
        rows,
    )


def straggling_host(job: Job, group: Group, host: int, hosts: list[Lateness], span: int) -> Finding:
    names, members = hosts_of(group)
    count = len(hosts[host].late)
    late, share = cost(hosts[host], span)
    order = sorted(range(len(names)), key=lambda one: -hosts[one].last)
    rows = [
        (
            names[one], spans(group.globals(members[one])),
            f"{hosts[one].last} of {count}", late_text(hosts[one]),
        )
        for one in order[:SHOWN]
    ]  # fmt: skip
    return Finding(
        Kind.STRAGGLER,
        f"host {names[host]} is a straggler: all of its {group.say(members[host])} were the last "
        f"to call {hosts[host].last} of {count} collectives{where(job, group)}, {late} after the "
        f"last rank of the other hosts on average; the others lost {share} of the time",
        ("host", "ranks", "was last in", "its first rank calls after the first of all"),
        rows,
    )


def late_text(late: Lateness) -> str:
    middle = statistics.median(late.late) if late.late else 0
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
        add = offsets(job, group)
        for calls in group.calls.values():
            times = called(calls, add)
            if len(times) < group.size:
                continue
            latest = max(times.values())
            for rank, operation in calls.items():
                peer = operation.longest_peer
                start = times.get(rank)
                if peer is None or start is None:
                    continue
                # A wait for another's late call may pass through any peer.
                late = latest - start
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
