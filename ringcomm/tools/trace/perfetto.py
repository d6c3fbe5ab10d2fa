"""A job's records as Chrome's trace events, which Perfetto opens.

Each rank is a process. A lane has its calls, one the time between them, one its waits, and one the
moving of bytes; a flow joins the ranks of a collective. Operations of a rank that overlap stand in
lanes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringcomm._flight.records import LONGEST_NS, GroupRecord, Operation
from ringcomm.tools.trace.clocks import shift_text
from ringcomm.tools.trace.job import Group, Job

LANES = ("calls", "compute", "wait", "move")
CALLS, COMPUTE, WAIT, MOVE = range(4)
WIDTH = 10  # lanes of a kind have numbers so far apart at most
Event = dict[str, Any]


@dataclass
class Slice:
    """An operation of one rank on the common clock; ns since the job's first."""

    group: Group
    record: GroupRecord
    operation: Operation
    called: int
    began: int
    ended: int
    lane: int = 0

    @property
    def waited(self) -> int:
        return min(self.operation.waited_ns, self.ended - self.began)


def slices_of(job: Job, last: int) -> dict[int, list[Slice]]:
    """Return the newest `last` operations of each global rank, by the time of the call.

    An operation that has not ended lasts until its process was last seen.
    """
    slices: dict[int, list[Slice]] = {}
    for group in job.groups:
        for record in group.records.values():
            own = slices.setdefault(record.global_rank, [])
            for operation in record.operations:
                called = job.called(record, operation)
                began = called if operation.began_ns is None else job.at(record, operation.began_ns)
                ended = lasted(job, record, operation)
                if operation.state == "queued":
                    began = ended
                own.append(Slice(group, record, operation, called, began, max(ended, began)))
    for rank, own in slices.items():
        slices[rank] = sorted(own, key=lambda slice_: (slice_.called, -slice_.ended))[-last:]
        place(slices[rank])
    start = min((own[0].called for own in slices.values() if own), default=0)
    for own in slices.values():
        for slice_ in own:
            slice_.called, slice_.began, slice_.ended = (
                at - start for at in (slice_.called, slice_.began, slice_.ended)
            )
    return dict(sorted(slices.items()))


def lasted(job: Job, record: GroupRecord, operation: Operation) -> int:
    """Return when an operation ended; else until when it is known to have lasted; ns since 1970.

    That is when its process was last seen, and no earlier than the last thing that was recorded.
    """
    if operation.ended_ns is not None:
        return job.at(record, operation.ended_ns)
    age = job.age(record, operation)
    if age is None or age > LONGEST_NS:
        return job.end
    return max(job.end, job.called(record, operation) + age)


def place(slices: list[Slice]) -> None:
    """Give each the lowest lane that is free when it is called."""
    free: list[int] = []
    for piece in slices:
        lane = next((lane for lane, at in enumerate(free) if at <= piece.called), len(free))
        free[lane : lane + 1] = [piece.ended]
        piece.lane = lane % WIDTH


def microseconds(ns: int) -> float:
    return ns / 1000


def events_of(job: Job, last: int) -> Iterator[Event]:
    every = slices_of(job, last)
    hosts = job.hosts()
    for rank, slices in every.items():
        yield from named(rank, hosts[rank], {piece.lane for piece in slices})
        for piece in slices:
            yield from drawn(rank, piece)
        yield from between(rank, slices)
    yield from flows(every)


def thread(kind: int, lane: int) -> int:
    """Return the number of a lane: those of overlapping operations stand below the others."""
    return 1 + lane * len(LANES) + kind


def named(rank: int, host: str, lanes: set[int]) -> Iterator[Event]:
    def meta(kind: str, tid: int, **arguments: Any) -> Event:
        return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": arguments}

    yield meta("process_name", 0, name=f"rank {rank} on {host}")
    yield meta("process_sort_index", 0, sort_index=rank)
    for lane in sorted(lanes | {0}):
        for kind, word in enumerate(LANES):
            if lane and kind == COMPUTE:
                continue  # a rank has one
            number = f" {lane + 1}" if lane else ""
            yield meta("thread_name", thread(kind, lane), name=f"{word}{number}")
            yield meta("thread_sort_index", thread(kind, lane), sort_index=thread(kind, lane))


def complete(rank: int, tid: int, name: str, begin: int, end: int, **arguments: Any) -> Event:
    at = {"ts": microseconds(begin), "dur": microseconds(end - begin)}
    return {"ph": "X", "cat": LANES[(tid - 1) % len(LANES)], "name": name, "pid": rank, "tid": tid,
            **at, "args": arguments}  # fmt: skip


def drawn(rank: int, piece: Slice) -> Iterator[Event]:
    """Yield the slices of one operation.

    How its waits and moves take turns is not recorded: the waits stand first.
    """
    operation = piece.operation
    arguments = {
        "group": piece.group.name, "state": operation.state, "arguments": operation.arguments,
        "algorithm": operation.algorithm, "bytes sent to other hosts": operation.sent,
        "frames sent again": operation.resent, "number": operation.number,
    }  # fmt: skip
    name = operation.name if operation.ended_ns else f"{operation.name} (not ended)"
    yield complete(rank, thread(CALLS, piece.lane), name, piece.called, piece.ended, **arguments)
    if piece.began > piece.called:
        yield complete(rank, thread(WAIT, piece.lane), "queued", piece.called, piece.began)
    moving = piece.began + piece.waited
    if piece.waited:
        peer = operation.longest_peer
        most = {} if peer is None else {
            "longest wait": f"{operation.longest_ns / 1000} µs",
            "for rank": piece.group.ranks[peer],
        }  # fmt: skip
        yield complete(rank, thread(WAIT, piece.lane), "wait (sum)", piece.began, moving, **most)
    if piece.ended > moving:
        yield complete(rank, thread(MOVE, piece.lane), "move (the rest)", moving, piece.ended)


def between(rank: int, slices: list[Slice]) -> Iterator[Event]:
    """Yield the times in which the rank was in no operation."""
    end = slices[0].called if slices else 0
    for piece in slices:
        if piece.called > end:
            yield complete(rank, thread(COMPUTE, 0), "compute", end, piece.called)
        end = max(end, piece.ended)


def flows(every: dict[int, list[Slice]]) -> Iterator[Event]:
    """Yield the flow of each collective: from the first rank that called to the last."""
    together: dict[tuple[int, int], list[tuple[int, Slice]]] = {}
    for rank, slices in every.items():
        for piece in slices:
            if not piece.operation.is_message and piece.ended > piece.called:
                key = (id(piece.group), piece.operation.sequence)
                together.setdefault(key, []).append((rank, piece))
    for number, some in enumerate(together.values(), 1):
        some.sort(key=lambda pair: pair[1].called)
        for i, (rank, piece) in enumerate(some):
            if len(some) < 2:
                break
            phase = "s" if i == 0 else "f" if i == len(some) - 1 else "t"
            binding = {"bp": "e"} if phase == "f" else {}
            yield {"ph": phase, "cat": "collective", "name": piece.operation.name, "id": number,
                   "pid": rank, "tid": thread(CALLS, piece.lane), "ts": microseconds(piece.called),
                   **binding}  # fmt: skip


def write_perfetto(job: Job, path: Path, last: int = 1000) -> None:
    """Write the trace. Raises OSError."""
    first = next(iter(job.bases), "")
    facts = {
        "job": job.name,
        "notes": job.remarks,
        "clocks": [shift_text(name, first, shift) for name, shift in job.shifts.items()],
    }
    head = json.dumps({"displayTimeUnit": "ms", "otherData": facts})
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{head[:-1]}, "traceEvents": [\n')
        for i, event in enumerate(events_of(job, last)):
            file.write(f"{',' * bool(i)}{json.dumps(event)}\n")
        file.write("]}\n")
