"""Slowness without a failure: straggling ranks and hosts, and networks that stood still."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from ringcomm._text import show_seconds, spans
from ringcomm.tools.trace.clocks import NEED_ALL
from ringcomm.tools.trace.findings import Finding, Kind, where
from ringcomm.tools.trace.job import Calls, Group, Job, clock_text

FEWEST = 10  # collectives, for a verdict on stragglers
OFTEN = 0.75  # a straggler is the last to call so many of the collectives
SHARE = 0.02  # the part of their time that the others lose for it
WORTH_NS = 50_000_000  # a loss that is worth a word
SLOW = 12.5e6  # bytes a second and rank between hosts: an Ethernet of 100 Mbit/s
LARGE = 1 << 16  # bytes of an operation for which speed counts, and not the way
STALL_NS = 200_000_000  # a wait of the network that is told, at least
TIMES = 20  # and so many times the median
SHOWN = 8  # ranks or hosts of a table of stragglers


@dataclass
class Lateness:
    """How late one rank, or all ranks of one host, call over the collectives of a group; ns."""

    name: str
    ranks: list[int]  # in the group
    last: int = 0  # collectives that it called last
    lost: int = 0  # how much later than the last of the others, in total
    late: list[int] = field(default_factory=list)  # after the first rank


def offsets(job: Job, group: Group) -> dict[int, int]:
    """Return by rank what leads from its steady clock to the common one; ns."""
    return {rank: job.at(record, 0) for rank, record in group.records.items()}


def called(calls: Calls, add: dict[int, int]) -> dict[int, int]:
    """Return by rank when it called; `add`: offsets()."""
    return {
        rank: operation.called_ns + add[rank]
        for rank, operation in calls.items()
        if operation.called_ns
    }


Times = dict[int, int]  # by the group's ranks: when each called; ns


def times_of(job: Job, group: Group) -> tuple[list[Times], int]:
    """Return the times of each collective that all ranks called, and from the first to the last."""
    every: list[Times] = []
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
            every.append(times)
    return every, ends[-1] - ends[0] if ends else 0


def count_late(every: list[Times], callers: list[Lateness]) -> None:
    """Count how late each of the callers is: a rank, or the ranks of a host.

    A caller is last where the first of its ranks calls after the last of all others.
    """
    for times in every:
        first = min(times.values())
        order = sorted(times, key=lambda rank: times[rank])
        for caller in callers:
            begins = min(map(times.__getitem__, caller.ranks))
            caller.late.append(begins - first)
            if set(order[-len(caller.ranks) :]).issubset(caller.ranks):
                caller.last += 1
                caller.lost += begins - times[order[-len(caller.ranks) - 1]]


def by_duration(calls: Calls) -> dict[int, int]:
    """Return when each rank called, before the common end: this needs no clock of other hosts.

    A collective that needs all ranks ends about everywhere at once. Nothing for others.
    """
    times = {}
    for rank, operation in calls.items():
        if operation.collective not in NEED_ALL or not operation.is_done:
            return {}
        if operation.called_ns and operation.ended_ns:
            times[rank] = operation.called_ns - operation.ended_ns
    return times if len(times) == len(calls) else {}


def stragglers(job: Job) -> Iterator[Finding]:
    """Name the host of each group whose ranks are all late, or the rank that is."""
    for group in job.groups:
        every, span = times_of(job, group)
        if len(every) < FEWEST:
            continue
        ranks = [Lateness(str(group.ranks[rank]), [rank]) for rank in range(group.size)]
        hosts = hosts_of(group)
        count_late(every, ranks + hosts)
        rank = worst(ranks, len(every), span)
        host = worst([host for host in hosts if len(host.ranks) > 1], len(every), span)
        if host is not None and (rank is None or host.lost >= rank.lost):
            yield straggling(job, group, host, hosts, span)
        elif rank is not None:
            yield straggling(job, group, rank, ranks, span)


def hosts_of(group: Group) -> list[Lateness]:
    """Return the hosts of a group; nothing where one of both says all."""
    hosts: dict[str, list[int]] = {}
    for rank, record in sorted(group.records.items()):
        hosts.setdefault(record.host, []).append(rank)
    return [Lateness(*host) for host in hosts.items()] if 1 < len(hosts) < group.size else []


def worst(callers: list[Lateness], count: int, span: int) -> Lateness | None:
    """Return the one that is last so often that it costs time, or None."""
    caller = max(callers, key=lambda caller: caller.last, default=None)
    if caller is None or caller.last < OFTEN * count:
        return None
    if caller.lost < max(SHARE * span, WORTH_NS):
        return None
    return caller


def straggling(
    job: Job, group: Group, slow: Lateness, callers: list[Lateness], span: int
) -> Finding:
    """Say how late a caller is: a host, if it has several ranks."""
    who, before = f"rank {slow.name} is a straggler: it was", "next rank"
    columns = ("rank", "host", "was last in", "calls after the first rank")
    others = [group.records[caller.ranks[0]].host for caller in callers]
    if len(slow.ranks) > 1:
        who = f"host {slow.name} is a straggler: all of its {group.say(slow.ranks)} were"
        before = "last rank of the other hosts"
        columns = ("host", "ranks", "was last in", "its first rank calls after the first of all")
        others = [spans(group.globals(caller.ranks)) for caller in callers]
    count = len(slow.late)
    average = show_seconds(slow.lost // max(slow.last, 1) / 1e9)
    share = f"{slow.lost / max(span, 1):.0%}"
    rows = [
        (caller.name, other, f"{caller.last} of {count}", late_text(caller))
        for caller, other in zip(callers, others, strict=True)
    ]
    order = sorted(range(len(callers)), key=lambda at: -callers[at].last)
    return Finding(
        Kind.STRAGGLER,
        f"{who} the last to call {slow.last} of {count} collectives{where(job, group)}, {average} "
        f"after the {before} on average; the others lost {share} of the time{often(group, slow)}",
        columns,
        [rows[at] for at in order[:SHOWN]],
        lost=slow.lost / 1e9,
    )


def often(group: Group, slow: Lateness) -> str:
    """Say which line of the program a rank is at between its calls, where its record tells it."""
    record = group.records[slow.ranks[0]]
    if len(slow.ranks) > 1 or not record.often:
        return ""
    return (
        f"; between its calls it is mostly at {record.often} (host {record.host}, pid {record.pid})"
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
    stalled = []
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
        stalled += [stall for stall in own if stall.ns > TIMES * middle]
    return stalled


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
    lead = (
        f"the network between {hosts[rank]} and {hosts[peer]} stood still"
        if peer in hosts and hosts[peer] != hosts[rank]
        else f"nothing came from rank {peer} for a while"
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
        f"{lead}: rank {rank} waited {show_seconds(worst.ns / 1e9)} for rank {peer} in "
        f"{worst.name}{where(job, worst.group)}, though all ranks had called it{frames}",
        ("rank", "waited for", "in", "called at", "wait", "frames sent again"),
        rows,
        lost=sum(stall.ns for stall in some) / 1e9,
    )


def slow_networks(job: Job) -> Iterator[Finding]:
    """Say that a group spends its time moving bytes between hosts, slower than a network should."""
    for group in job.groups:
        moved = moving = 0
        for calls in group.calls.values():
            taken = [
                operation.ended_ns - operation.called_ns
                for operation in calls.values()
                if operation.is_done and operation.ended_ns and operation.called_ns
            ]
            sent = max(operation.sent for operation in calls.values())
            if len(taken) == group.size and sent >= LARGE:
                moved += sent
                moving += min(taken)  # of the rank that called last
        _, span = times_of(job, group)
        if moving > max(OFTEN * span, WORTH_NS) and moved < SLOW * moving / 1e9:
            yield slow_network(job, group, moved / moving * 1e9, moving)


def slow_network(job: Job, group: Group, rate: float, moving: int) -> Finding:
    hosts = job.hosts()
    waits = sorted(
        (
            (wait, group.ranks[rank], group.ranks[peer])
            for rank, record in group.records.items()
            for peer, wait in enumerate(record.waits_ns)
            if wait
        ),
        reverse=True,
    )
    most = "".join(
        f", most of all rank {rank} on {hosts.get(rank, '?')} for rank {peer} on "
        f"{hosts.get(peer, '?')}"
        for _, rank, peer in waits[:1]
    )
    return Finding(
        Kind.NETWORK,
        f"the network between the hosts is slow: the ranks{where(job, group)} send "
        f"{rate / 1e6:.3g} MB/s each, and wait{most}; `ringcomm doctor` measures every link",
        ("rank", "waited for", "for"),
        [(str(rank), str(peer), show_seconds(wait / 1e9)) for wait, rank, peer in waits[:12]],
        lost=moving / 1e9,
    )
