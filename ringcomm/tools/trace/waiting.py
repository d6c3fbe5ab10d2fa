"""Ranks that wait for others: missing ranks, dead ranks, deadlocks, and calls that stand still."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ringcomm._flight.processes import is_stopped
from ringcomm._flight.records import GroupRecord, Operation
from ringcomm._text import ranks_text, show_seconds
from ringcomm.tools.trace.findings import COLUMNS, Finding, Kind, since, table, where
from ringcomm.tools.trace.job import YOUNG_NS, Group, Job, clock_text

FEW = 3  # ranks whose places a sentence has room for
# The others' words about a rank that is gone (csrc/report/diagnosis.cc).
GONE = re.compile(
    r"rank (\d+)(?:: | )(its process died|no answer from|has left the group)"
    r"|rank (\d+) failed: its program (ended with .+)"
)


@dataclass
class Stop:
    """The first collective of a group that some rank called and has not finished."""

    group: Group
    sequence: int
    waiting: list[int]  # who called it and is in it still
    missing: list[int]  # who has not called it

    @property
    def call(self) -> Operation:
        return self.group.calls[self.sequence][self.waiting[0]]


def stops(job: Job) -> list[Stop]:
    """Return where groups stopped, but for those whose ranks called different things."""
    stopped = []
    for group in job.groups:
        if group.differing:
            continue
        for sequence, calls in group.calls.items():
            waiting = [rank for rank, operation in calls.items() if not operation.is_done]
            if waiting:
                missing = [rank for rank in range(group.size) if group.lacks(rank, sequence)]
                stopped.append(Stop(group, sequence, waiting, missing))
                break
    return stopped


Edges = dict[int, dict[int, Stop]]  # rank -> the rank that it waits for, and where: global


def edges_of(some: list[Stop]) -> Edges:
    edges: Edges = {}
    for stop in some:
        for a in stop.waiting:
            for b in stop.missing:
                edges.setdefault(stop.group.ranks[a], {})[stop.group.ranks[b]] = stop
    return edges


def cycle_in(edges: Edges) -> list[int]:
    """Return the shortest chain of ranks that wait for one another, or nothing."""
    best: list[int] = []
    for start in sorted(edges):
        before: dict[int, int] = {}
        queue = [start]
        for rank in queue:
            for other in sorted(edges.get(rank, {})):
                if other == start:
                    chain = [rank]
                    while chain[-1] != start:
                        chain.append(before[chain[-1]])
                    if not best or len(chain) < len(best):
                        best = chain[::-1]
                    queue = []
                    break
                if other not in before:
                    before[other] = rank
                    queue.append(other)
            if not queue:
                break
        if len(best) == 2:
            break
    return best


def is_young(job: Job, stop: Stop) -> bool:
    """Tell whether ranks of a job without failures had not waited longer there than they often do.

    A job that runs waits somewhere at every moment, and one that was canceled did.
    """
    records = stop.group.records
    if any(record.failure for record in records.values()):
        return False
    if any(stop.group.ranks[rank] in gone(job) for rank in stop.missing):
        return False
    ages = [job.age(records[rank], stop.group.calls[stop.sequence][rank]) for rank in stop.waiting]
    usual = sorted(
        operation.ended_ns - operation.called_ns
        for calls in stop.group.calls.values()
        for operation in calls.values()
        if operation.is_done and operation.ended_ns and operation.called_ns
    )
    often = usual[len(usual) * 9 // 10] if usual else 0
    return all(age is not None and age < max(YOUNG_NS, 2 * often) for age in ages)


def young(job: Job) -> list[str]:
    """Return what ranks have begun to wait for."""
    return [
        f"{never_called(job, stop, stop.group.globals(stop.missing))}; {wait_text(job, stop)}"
        for stop in stops(job)
        if stop.missing and is_young(job, stop)
    ]


def never_called(job: Job, stop: Stop, ranks: list[int]) -> str:
    here = f"{stop.call.name}{where(job, stop.group)}"
    if not job.is_alive:
        return f"{ranks_text(ranks)} never called {here}"
    return f"{ranks_text(ranks)} {'have' if len(ranks) > 1 else 'has'} not called {here} yet"


def wait_text(job: Job, stop: Stop) -> str:
    """Return "the others wait there since 12:03:07"."""
    group, calls = stop.group, stop.group.calls[stop.sequence]
    clock = since(job, group, calls, stop.waiting)
    if job.lost and not job.is_alive:
        who = "the others" if len(stop.waiting) > 1 else group.say(stop.waiting)
        return f"{who} had waited there since {clock}"
    others = "the others wait" if len(stop.waiting) > 1 else f"{group.say(stop.waiting)} waits"
    ages = [job.age(group.records[rank], calls[rank]) for rank in stop.waiting]
    length = (
        f", for {show_seconds(max(filter(None, ages)) / 1e9)}" if job.is_alive and any(ages) else ""
    )
    return f"{others} there since {clock}{length}"


def waiting(job: Job) -> Iterator[Finding]:
    some = [stop for stop in stops(job) if not is_young(job, stop)]
    edges = edges_of(some)
    cycle = cycle_in(edges)
    locked: set[int] = set()
    if cycle:
        links = [edges[a][b] for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
        locked = {id(stop) for stop in links}
        yield deadlock(job, cycle, links)
    differing = [group for group in job.groups if group.differing]
    for stop in some:
        # The missing ranks may themselves wait for others, or be in a mismatch.
        missing = {stop.group.ranks[rank] for rank in stop.missing}
        behind = {rank for rank in missing if rank in edges}
        behind |= {rank for rank in missing for group in differing if rank in group.ranks}
        follows = bool(missing) and behind == missing
        if id(stop) not in locked:
            finding = missing_ranks(job, stop) if missing else still(job, stop)
            finding.follows = follows or bool(cycle)
            yield finding


def deadlock(job: Job, cycle: list[int], links: list[Stop]) -> Finding:
    parts = [
        f"rank {rank} in {stop.call.name} of group {stop.group.name}{line_of(stop.group, rank)}"
        for rank, stop in zip(cycle, links, strict=True)
    ]
    rows = [
        (
            str(rank), f"{stop.call} of group {stop.group.name}",
            since(job, stop.group, stop.group.calls[stop.sequence],
                  [stop.group.ranks.index(rank)]),
            str(cycle[(i + 1) % len(cycle)]),
        )
        for i, (rank, stop) in enumerate(zip(cycle, links, strict=True))
    ]  # fmt: skip
    return Finding(
        Kind.DEADLOCK,
        f"{ranks_text(cycle)} wait for each other in different groups: {', '.join(parts)}; "
        "every rank must use its groups in the same order",
        ("rank", "waits in", "since", "for rank"),
        rows,
    )


def line_of(group: Group, rank: int) -> str:
    """Return " (train.py:42 in step)", where a rank waits in a group, or "" if it is not known."""
    member = group.ranks.index(rank)
    last, record = group.last.get(member), group.records.get(member)
    at = (last.line.rpartition("/")[2] if last else "") or (record.at if record else "")
    return f" ({at})" if at else ""


def gone(job: Job) -> dict[int, tuple[str, str]]:
    """Map global ranks to "died", "is out of reach" or "left", and who says so in what words."""
    verbs = {"its": "died", "no": "is out of reach", "has": "left the group"}
    left: dict[int, tuple[str, str]] = {}
    for group in job.groups:
        for rank, record in sorted(group.records.items()):
            for match in GONE.finditer(record.failure):
                peer, verb = int(match[1] or match[3]), match[4]
                said = f"rank {group.ranks[rank]} says: {record.failure}"
                if not verb:
                    verb = verbs[match[2].split()[0]]
                if peer < group.size:
                    left.setdefault(group.ranks[peer], (verb, "" if match[4] else said))
    # Once a job has ended, all of its processes are gone: that tells nothing.
    for record in job.lost if job.is_alive else ():
        said = f"its process, {record.pid} on {record.host}, is gone"
        left.setdefault(record.global_rank, ("died", said))
    return left


def missing_ranks(job: Job, stop: Stop) -> Finding:
    """Say who never called a collective, and where it was last."""
    group = stop.group
    ranks = group.globals(stop.missing)
    here = f"{stop.call.name}{where(job, group)}"
    wait = wait_text(job, stop)
    dead = {rank: said for rank, said in gone(job).items() if rank in ranks}
    silent = [rank for rank in ranks if group.ranks.index(rank) not in group.records]
    if dead:
        rank, (verb, said) = next(iter(dead.items()))
        last = last_text(job, group, rank)
        who = ranks_text([r for r, (v, _) in dead.items() if v == verb])
        text = f"{who} {verb} before {here}; {wait}{last}{f'; {said}' if said else ''}"
        kind = Kind.DEAD
    elif silent == ranks:
        text = f"{job.no_record(ranks)}, and {wait.replace('there', f'in {here}')}"
        kind = Kind.DEAD
    else:
        present = [rank for rank in ranks if rank not in silent]
        text = f"{never_called(job, stop, present)}{places_text(job, group, present)}; {wait}"
        text += last_text(job, group, present[0]) if len(present) == 1 else ""
        text += f"; {job.no_record(silent)}" if silent else ""
        kind = Kind.MISSING
    return Finding(kind, text + unread_text(stop), COLUMNS, table(job, group, stop.sequence))


def places_text(job: Job, group: Group, ranks: list[int]) -> str:
    """Return ": it is at train.py:42 in load (host a, pid 7)" for a few ranks that left stacks."""
    records = [group.records[group.ranks.index(rank)] for rank in ranks]
    places = [place_of(job, record) for record in records]
    if len(ranks) > FEW or not any(places):
        return ""
    parts = [
        f"{'it' if len(ranks) == 1 else f'rank {rank}'} {place or 'is at an unknown line'} "
        f"(host {record.host}, pid {record.pid})"
        for rank, record, place in zip(ranks, records, places, strict=True)
    ]
    return f": {', '.join(parts)}"


def place_of(job: Job, record: GroupRecord) -> str:
    """Return "is at train.py:42 in load", or "" where its record does not tell."""
    if is_stopped(record.process):
        return "is stopped by a signal; `kill -CONT` lets it go on"
    return f"{'is' if job.is_alive else 'was'} at {record.at}" if record.at else ""


def unread_text(stop: Stop) -> str:
    """Name the ranks that may or may not have come here: their records do not tell."""
    ranks = stop.group.unread(stop.sequence)
    return f"; what {stop.group.say(ranks)} called last cannot be read" if ranks else ""


def last_text(job: Job, group: Group, rank: int) -> str:
    """Return "; it was last in all_gather #411", of the group; else of any other."""
    index = group.ranks.index(rank)
    if index not in group.records:
        return (
            "; it left no record that can be read" if rank in job.unread else "; it left no record"
        )
    elsewhere = [
        (other, operation)
        for other in job.groups
        if other is not group and rank in other.ranks
        for operation in [other.last.get(other.ranks.index(rank))]
        if operation and not operation.is_done
    ]
    if elsewhere:
        other, operation = elsewhere[0]
        return f"; it is in {operation.name} of group {other.name}"
    last = group.last[index]
    if last is None:
        return "; it has called nothing in this group"
    record = group.records[index]
    ended = job.at(record, last.ended_ns) if last.is_done and last.ended_ns else None
    when = f", which ended there at {clock_text(ended)}" if ended else ""
    return f"; it was last in {last.name}{when}"


def still(job: Job, stop: Stop) -> Finding:
    """Say that all ranks called a collective, and some have not finished."""
    group, calls = stop.group, stop.group.calls[stop.sequence]
    begun = max(job.called(group.records[rank], op) for rank, op in calls.items())
    here = f"{stop.call.name}{where(job, group)}"
    done = [rank for rank in calls if rank not in stop.waiting]
    hidden = unread_text(stop)
    who = group.say(stop.waiting) if done or hidden else "all ranks"
    verb = "is" if len(stop.waiting) == 1 else "are"
    dead = {rank: said for rank, said in gone(job).items() if rank in group.ranks}
    if dead:
        rank, (word, said) = next(iter(dead.items()))
        return Finding(
            Kind.DEAD,
            f"rank {rank} {word} in {here}, which the last rank called at {clock_text(begun)}; "
            f"{said}",
            COLUMNS,
            table(job, group, stop.sequence),
        )
    quiet = quiet_ranks(stop)
    if quiet:
        return Finding(
            Kind.DEAD,
            f"the record of {group.say(quiet)} ends in {here} with no word of a failure, and the "
            "others failed: its process was killed, it seems",
            COLUMNS,
            table(job, group, stop.sequence),
        )
    peers = waits_of(group, stop)
    return Finding(
        Kind.STILL,
        f"{who} {verb} in {here}, which the last rank called at {clock_text(begun)}"
        f"{hidden or ', and no rank is missing'}{peers}",
        COLUMNS,
        table(job, group, stop.sequence),
    )


def quiet_ranks(stop: Stop) -> list[int]:
    """Return the ranks that are in it and did not fail, where most others failed."""
    failed = [rank for rank, record in stop.group.records.items() if record.failure]
    quiet = [rank for rank in stop.waiting if not stop.group.records[rank].failure]
    return quiet if len(failed) > len(quiet) > 0 else []


def waits_of(group: Group, stop: Stop) -> str:
    """Name the peer for which the longest wait of the collective is."""
    own = [(group.calls[stop.sequence][rank], rank) for rank in stop.waiting]
    longest, rank = max(own, key=lambda pair: pair[0].longest_ns)
    if longest.longest_peer is None or not longest.longest_ns:
        return ""
    resent = f", and sent {longest.resent} frames again" if longest.resent else ""
    return (
        f"; {group.say([rank])} waited longest: {show_seconds(longest.longest_ns / 1e9)} for "
        f"{group.say([longest.longest_peer])}{resent}"
    )
