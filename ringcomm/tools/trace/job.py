"""A job as its records tell it: groups, and the calls of a group by their sequence number."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from ringcomm._flight.processes import Life, Process, life_of
from ringcomm._flight.records import GroupRecord, Operation, last_ns
from ringcomm._text import ranks_text

Calls = dict[int, Operation]  # by the group's ranks
YOUNG_NS = 10**9  # a wait that is not worth a word
FRESH_NS = 10 * 10**9  # records that end so lately may be those of a job that runs


@dataclass
class Group:
    """A group, with the records of those of its ranks that left one."""

    name: str
    ranks: tuple[int, ...]  # global
    records: dict[int, GroupRecord] = field(default_factory=dict)  # by the group's ranks

    @property
    def size(self) -> int:
        return len(self.ranks)

    @functools.cached_property
    def calls(self) -> dict[int, Calls]:
        """Map sequence numbers to what each rank called under them."""
        by_sequence: dict[int, Calls] = {}
        for rank, record in sorted(self.records.items()):
            for operation in record.operations:
                if not operation.is_message:
                    by_sequence.setdefault(operation.sequence, {})[rank] = operation
        return dict(sorted(by_sequence.items()))

    @functools.cached_property
    def differing(self) -> set[int]:
        """The sequence numbers under which ranks called different things."""
        numbers = set()
        for sequence, calls in self.calls.items():
            every = iter(calls.values())
            first = next(every).call
            if any(operation.call != first for operation in every):
                numbers.add(sequence)
        return numbers

    @functools.cached_property
    def last(self) -> dict[int, Operation | None]:
        """The last collective that each rank called, of those that left a record."""
        newest: dict[int, Operation | None] = dict.fromkeys(self.records)
        for calls in self.calls.values():
            newest.update(calls)
        return newest

    def lacks(self, rank: int, sequence: int) -> bool:
        """Tell whether a rank has not come to a collective; a rank without record never has."""
        last = self.last.get(rank)
        behind = rank in self.records and self.records[rank].is_behind
        return not behind and (last is None or last.sequence < sequence)

    def unread(self, sequence: int) -> list[int]:
        """Return the ranks of which damage hides whether they came to a collective."""
        return [
            rank
            for rank, record in self.records.items()
            if record.is_behind and rank not in self.calls.get(sequence, {})
        ]

    def globals(self, ranks: Iterable[int]) -> list[int]:
        return sorted(self.ranks[rank] for rank in ranks)

    def say(self, ranks: Iterable[int]) -> str:
        """Return "rank 3", "ranks 0-2 and 5": global ranks."""
        return ranks_text(self.globals(ranks))


@dataclass
class Shift:
    """The correction of a host's clock, and the bounds between which it may lie; ns.

    None: the records give no bound.
    """

    ns: int = 0
    lowest: int | None = None
    highest: int | None = None


@dataclass
class Job:
    """The records of one job, and what its clocks need to agree."""

    name: str
    groups: list[Group]
    remarks: list[str] = field(default_factory=list)
    clocks: dict[int, str] = field(default_factory=dict)  # the clock of each process, by id(record)
    bases: dict[str, int] = field(default_factory=dict)  # by clock: wall less steady
    shifts: dict[str, Shift] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)  # ranks whose files were left out

    @property
    def records(self) -> list[GroupRecord]:
        return [record for group in self.groups for record in group.records.values()]

    @property
    def ranks(self) -> list[int]:
        """All global ranks, those without a record too."""
        return sorted({rank for group in self.groups for rank in group.ranks})

    @property
    def silent(self) -> list[int]:
        """The ranks without a record."""
        return sorted({*self.ranks} - {record.global_rank for record in self.records})

    def no_record(self, ranks: list[int]) -> str:
        """Return "rank 3 left no record", of silent ranks."""
        readable = " that can be read" if self.unread.intersection(ranks) else ""
        return f"{ranks_text(ranks)} left no record{readable}"

    @functools.cached_property
    def lives(self) -> dict[Process, Life]:
        """Map the processes of the records to what is known of them."""
        return {
            process: life_of(process) for process in {record.process for record in self.records}
        }

    @functools.cached_property
    def is_alive(self) -> bool:
        """Tell whether the job runs, as far as this host can know, or has just been seen."""
        lives = {*self.lives.values()}
        age = time.time_ns() - max((record.seen_ns for record in self.records), default=0)
        return Life.LIVES in lives or (lives == {Life.UNKNOWN} and 0 <= age < FRESH_NS)

    @functools.cached_property
    def has_failed(self) -> bool:
        return any(record.failure for record in self.records)

    @functools.cached_property
    def lost(self) -> list[GroupRecord]:
        """A record of each process that is gone, and has said neither that it ended nor why."""
        told = {record.process for record in self.records if record.failure}
        open_ones = {record.process: record for record in self.records if not record.has_left}
        return [
            record
            for process, record in open_ones.items()
            if process not in told and self.lives[process] == Life.GONE and not process.snapshot
        ]

    def age(self, record: GroupRecord, operation: Operation) -> int | None:
        """Return how long an operation has lasted, or had when its process was last seen; ns.

        None: that is unknown.
        """
        called = operation.called_ns or record.steady_ns
        if self.lives[record.process] == Life.LIVES and not record.process.snapshot:
            return max(record.read_ns - called, 0)  # it may have ended since
        seen = max(own.seen_ns for own in self.records if own.process == record.process)
        if not seen or not record.process.boot:
            return None
        return max(seen - (called + record.wall_ns - record.steady_ns), 0)

    @functools.cached_property
    def end(self) -> int:
        """When something was last recorded; 0 where nothing was."""
        return max((self.at(record, last_ns(record)) for record in self.records), default=0)

    def at(self, record: GroupRecord, steady_ns: int) -> int:
        """Return the wall time, in ns since 1970, of a time of a rank's steady clock."""
        clock = self.clocks[id(record)]
        return steady_ns + self.bases[clock] + self.shifts.get(clock, Shift()).ns

    def called(self, record: GroupRecord, operation: Operation) -> int:
        return self.at(record, operation.called_ns or record.steady_ns)

    def hosts(self) -> dict[int, str]:
        return {record.global_rank: record.host for record in self.records}


def groups_of(records: Iterable[GroupRecord]) -> list[Group]:
    """Put together the records of each group. A name that was used again is another group."""
    groups: dict[Hashable, Group] = {}
    times: dict[Hashable, int] = {}
    for record in sorted(records, key=lambda record: record.wall_ns):
        key = (record.group, record.global_ranks)
        which = (*key, record.meeting, record.device)
        if not record.meeting:
            times[(*key, record.rank)] = nth = times.get((*key, record.rank), 0) + 1
            which = (*key, nth, False)
        if which not in groups:
            times[key] = nth = times.get(key, 0) + 1
            name = record.group if nth == 1 else f"{record.group} ({nth})"
            groups[which] = Group(name, record.global_ranks)
        groups[which].records[record.rank] = record
    return list(groups.values())


def clock_text(wall_ns: int, digits: int = 0) -> str:
    """Return "12:03:07" or "12:03:07.123", in the local time zone."""
    part = f".{wall_ns % 10**9:09d}"[: digits + 1] if digits else ""
    return f"{local(wall_ns):%H:%M:%S}{part}"


def day_text(wall_ns: int) -> str:
    """Return "2026-11-23 UTC"."""
    return f"{local(wall_ns):%Y-%m-%d %Z}"


def local(wall_ns: int) -> datetime.datetime:
    """Return the local time; that of 1970 where a damaged record has no time at all."""
    try:
        return datetime.datetime.fromtimestamp(wall_ns // 10**9).astimezone()
    except (OSError, OverflowError, ValueError):
        return datetime.datetime.fromtimestamp(0).astimezone()
