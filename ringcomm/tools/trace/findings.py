"""Findings: what went wrong in a job, as a sentence and a table."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ringcomm._flight.records import GroupRecord, Operation
from ringcomm._text import ranks_text, show_seconds, spans
from ringcomm.tools.trace.job import Calls, Group, Job, clock_text, day_text

ROWS = 16  # a table that names ranks has no more: further ranks are put together


class Kind(enum.IntEnum):
    """Kinds of findings: causes come before what follows from them."""

    MISMATCH = 1
    DEADLOCK = 2
    GONE = 3
    DEAD = 4
    MISSING = 5
    MESSAGE = 6
    STILL = 7
    FAILED = 8
    NETWORK = 9
    STRAGGLER = 10


@dataclass
class Finding:
    """One thing that went wrong: a sentence, and the table that shows it."""

    kind: Kind
    sentence: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    follows: bool = False  # from another finding
    lost: float = 0  # seconds, of what is only slow


COLUMNS = ("rank", "host", "call", "state", "called at", "before that")


def state_text(job: Job, record: GroupRecord, operation: Operation) -> str:
    """Return "done after 3 ms", "running"."""
    if not operation.is_done or not operation.ended_ns or not operation.called_ns:
        return operation.state
    return f"done after {show_seconds((operation.ended_ns - operation.called_ns) / 1e9)}"


def table(job: Job, group: Group, sequence: int) -> list[tuple[str, ...]]:
    """Return a row for each rank about one collective; equal rows are put together."""
    rows: dict[tuple[str, ...], list[int]] = {}
    hosts: dict[tuple[str, ...], set[str]] = {}
    calls = group.calls.get(sequence, {})
    few = group.size <= ROWS
    hidden = group.unread(sequence)
    for rank in range(group.size):
        record = group.records.get(rank)
        if record is None:
            row = ("no record", "", "", "")
        else:
            before = previous(group, rank, sequence)
            earlier = f"{before.name}, {before.state}" if before else "nothing in this group"
            earlier += line_text(before) if before else ""
            operation = calls.get(rank)
            if operation is None:
                never = "not called yet" if job.is_alive else "never called"
                row = ("cannot be read" if rank in hidden else never, "", "", earlier)
            else:
                at = clock_text(job.called(record, operation), 3 if few else 0)
                state = state_text(job, record, operation) if few else operation.state
                row = (f"{operation}{line_text(operation)}", state, at, earlier)
        key = (*row, str(rank)) if few else row
        rows.setdefault(key, []).append(rank)
        hosts.setdefault(key, set()).add(record.host if record else "?")
    return [
        (spans(group.globals(ranks)), hosts_text(hosts[key]), *key[:4])
        for key, ranks in rows.items()
    ]


def line_text(operation: Operation) -> str:
    """Return " (train.py:42 in step)", or "" where the line is not known."""
    return f" ({operation.line.rpartition('/')[2]})" if operation.line else ""


def hosts_text(hosts: set[str]) -> str:
    return ", ".join(sorted(hosts)) if len(hosts) < 3 else f"{len(hosts)} hosts"


def previous(group: Group, rank: int, sequence: int) -> Operation | None:
    """Return what a rank called last before a collective of its group."""
    older = (calls[rank] for n, calls in group.calls.items() if n < sequence and rank in calls)
    return max(older, key=lambda operation: operation.sequence, default=None)


def where(job: Job, group: Group) -> str:
    """Return " of group 1", or "" where the job has no other."""
    return f" of group {group.name}" if len(job.groups) > 1 else ""


def since(job: Job, group: Group, calls: Calls, ranks: Iterable[int]) -> str:
    """Say since when ranks wait in a collective."""
    return clock_text(min(job.called(group.records[rank], calls[rank]) for rank in ranks))


def summary(job: Job) -> str:
    """Say what the records hold."""
    operations = sum(len(record.operations) for record in job.records)
    count = len({record.global_rank for record in job.records})
    text = (
        f"{count} of {len(job.ranks)} ranks left a record of job {job.name}: "
        f"{operations} operations in {len(job.groups)} group{'s' * (len(job.groups) != 1)}"
    )
    if not operations:
        return text
    return f"{text}, the last at {clock_text(job.end)} ({day_text(job.end)})"


def nothing_wrong(job: Job) -> str:
    """Return the first sentence where there are no findings."""
    if job.silent:
        others = ranks_text(sorted({*job.ranks} - {*job.silent}))
        them = "them" if len(job.silent) > 1 else "it"
        return (
            f"{job.no_record(job.silent)}, so nothing is known of {them}; nothing is wrong in the "
            f"record of {others}"
        )
    last = [calls for group in job.groups for calls in group.calls.values()]
    if any(not operation.is_done for calls in last for operation in calls.values()):
        return "nothing is wrong so far: no rank has waited for long"
    if not last:
        return "nothing is wrong: no collective was called"
    return "nothing is wrong: every operation that was called has ended"
