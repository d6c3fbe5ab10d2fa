"""The flight records of a job: what each rank called in each group, and how far it came.

A rank writes one ring file for each of its groups while the job runs, so the file is there even
when the rank was killed. All that reads these bytes is here, and the pickles of ranks that left no
ring file. It needs neither torch nor the library.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import pickle
import re
import struct
import tempfile
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ringcomm._flight import processes
from ringcomm._flight.processes import Process
from ringcomm._runtime.lines import innermost
from ringcomm._text import counted

MAGIC = b"RINGREC1"
VERSION = 2
CLOCKS = struct.Struct("<8sQqq")  # magic, begun, steady, wall
TRAFFIC_AT, SEEN_AT, HEADER_AT = 32, 56, 64
LEFT_AT, MOMENTS_AT, FAILURE_AT, HEADER_END = 3032, 3040, 3072, 4096
TRAFFIC = struct.Struct("<3Q")  # bytes sent, frames sent again, connections lost
TOTALS = struct.Struct("<3Q")  # operations, bytes and ticks of a collective
MOMENTS = struct.Struct("<4q")  # ticks and ns of the steady clock: as the process began, and later
RECORD = struct.Struct("<8Q3q3QiIII")
LONGEST_NS = 365 * 86400 * 10**9  # no job lasts longer: later times are damage
NOBODY = 0xFFFFFF  # no root, or any rank
# The exceptions that reading a damaged header may raise.
DAMAGE = (LookupError, TypeError, ValueError, ArithmeticError, struct.error)
# As `Purpose` in csrc/report/operation.h.
CALL, SEVERAL, SPARSE, MEMORY, STAGED, CODES = range(6)
STATES = ("queued", "running", "done", "failed")
MESSAGES = ("send", "recv")
WINDOWS = 1 << 31  # tags from here on are those of windows: as kWindowTags in the same file


@dataclass(slots=True)
class Operation:
    """A call of a collective, or of a send or recv, on one rank.

    Times are nanoseconds of the host's steady clock, and None for what has not happened. Ranks are
    those of the group.
    """

    number: int  # counts all operations of the group on this rank, from 1
    sequence: int  # counts collectives, equal on all ranks; 0 for messages
    collective: str  # or "send", "recv"
    dtype: str
    op: str | None  # "SUM"
    root: int | None  # or the peer of a message; None: none, or any
    elements: int
    splits: int  # hash of uneven shards, else 0; the tag of a message
    layout: int  # hash of all else that ranks give alike: sizes of a list, memory layouts; or 0
    algorithm: str
    called_ns: int | None = None
    began_ns: int | None = None
    ended_ns: int | None = None
    sent: int = 0  # bytes, to other hosts
    waited_ns: int = 0
    longest_ns: int = 0  # the longest wait for one peer
    longest_peer: int | None = None
    resent: int = 0  # frames
    state: str = "done"
    purpose: int = CALL
    line: str = ""  # where the program called: "train.py:42 in step"

    @property
    def is_message(self) -> bool:
        return self.collective in MESSAGES

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    @property
    def call(self) -> tuple[Any, ...]:
        """The arguments that have to be equal on all ranks."""
        shape = (self.elements, self.splits, self.layout, self.purpose)
        return (self.collective, self.dtype, self.op, self.root, *shape)

    @property
    def name(self) -> str:
        """Return "all_reduce #412", "recv with tag 3", or "signal of window 0"."""
        if self.window is not None:
            return f"{self.kind} {'into' if self.kind == 'put' else 'of'} window {self.window}"
        if self.is_message:
            return f"{self.collective} with tag {self.splits}"
        return f"{self.collective} #{self.sequence}"

    @property
    def window(self) -> int | None:
        """The number of the window of a put, a signal, or a wait for one."""
        return self.splits - WINDOWS if self.is_message and self.splits >= WINDOWS else None

    @property
    def kind(self) -> str:
        """Return the collective, "send", "recv", "put", "signal" or "wait_signal"."""
        if self.window is None:
            return self.collective
        if self.collective == "recv":
            return "wait_signal"
        return "put" if self.elements else "signal"

    @property
    def arguments(self) -> str:
        """Return "float32[500000] SUM": as the library's own texts have it (to_text in C++)."""
        if self.is_message:
            return f"{self.dtype}[{self.elements}]"
        if self.collective == "barrier":
            return ""
        sized = self.collective != "all_to_all" and self.purpose != SPARSE
        words = [f"{self.dtype}[{self.elements}]" if sized else self.dtype]
        words += [self.op] if self.op else []
        words += [f"root {self.root}"] if self.root is not None else []
        words += ["uneven"] if self.splits else []
        if self.purpose == SPARSE:
            words.append(f"of sparse tensors of sizes #{self.layout % 10000}")
        elif self.purpose == CODES:
            words.append(f"for a quantized all_reduce #{self.layout % 10000}")
        elif self.purpose == SEVERAL:
            words.append(f"in tensors of sizes #{self.layout % 10000}")
        elif self.layout:
            words.append(f"memory layout {self.layout % 10000}")
        return " ".join(words)

    def __str__(self) -> str:
        return f"{self.name} {self.arguments}".rstrip()


class Total(NamedTuple):
    """The operations of one collective that ended well, and the bytes of their larger sides."""

    operations: int
    bytes: int
    seconds: float


@dataclass
class GroupRecord:
    """A rank's record of one group: the newest `capacity` operations, the oldest first."""

    job: str  # "run/restart"
    pid: int
    host: str
    rank: int  # in the group
    global_ranks: tuple[int, ...]  # by member
    group: str
    steady_ns: int  # both clocks at one moment, at which the record was made
    wall_ns: int
    device: bool = False
    meeting: int = 0  # equal on all ranks of the group, and no other group's; 0: not known
    begun: int = 0  # operations so far
    capacity: int = 0
    failure: str = ""  # why the group failed here
    ringcomm: str = ""  # versions
    torch: str = ""
    operations: list[Operation] = field(default_factory=list)
    waits_ns: tuple[int, ...] = ()  # for each peer, in total
    totals: dict[str, Total] = field(default_factory=dict)  # by collective
    traffic: tuple[int, ...] = (0, 0, 0)  # bytes sent, frames sent again, connections lost
    process: Process = field(default_factory=lambda: Process(0))
    seen_ns: int = 0  # by the wall clock: when the process lived for sure; 0: not known
    has_left: bool = False  # it was destroyed, or its program ended as it should
    read_ns: int = 0  # by the steady clock of this host: just before its file was read
    at: str = ""  # the line of the program that its main thread was at, "train.py:42 in step"
    often: str = ""  # the line that it was at most often, of a job that wrote as it ran
    source: str = ""  # the file
    remarks: list[str] = field(default_factory=list)  # about damage

    @property
    def size(self) -> int:
        return len(self.global_ranks)

    @property
    def global_rank(self) -> int:
        return self.global_ranks[self.rank]

    @property
    def lost(self) -> int:
        """How many older operations newer ones have overwritten."""
        return max(self.begun - self.capacity, 0)

    @property
    def is_behind(self) -> bool:
        """Tell whether newer operations were begun than those that could be read."""
        return self.begun > max((operation.number for operation in self.operations), default=0)


# Fields of an operation and of a group in the pickle of a rank. Only ring files have the rest.
FIELDS = [field.name for field in dataclasses.fields(Operation)]
_OTHERS = {"operations", "source", "remarks", "process", "seen_ns", "has_left", "read_ns", "at"}
_OTHERS |= {"often", "totals", "traffic"}
HEADER = [field.name for field in dataclasses.fields(GroupRecord) if field.name not in _OTHERS]


class Ticks:
    """The clock of a record's times: counts of the processor, or of another clock."""

    def __init__(self, data: bytes) -> None:
        """Read two moments of a ring file. Raises ValueError where these cannot be."""
        then, then_ns, self.now, self.now_ns = MOMENTS.unpack_from(data, MOMENTS_AT)
        passed = self.now - then
        self.length = (self.now_ns - then_ns) / passed if passed else 1.0  # a tick's, in ns
        if not 0.05 < self.length < 1000:
            raise ValueError(f"a tick of {self.length} ns")

    def ns(self, ticks: int) -> int | None:
        """Return the time by the steady clock, or None for 0, which is not yet."""
        return self.now_ns + round((ticks - self.now) * self.length) if ticks else None


def text_of(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")


def header_of(data: bytes) -> dict[str, Any]:
    """Return the JSON of a ring file. Raises ValueError with a sentence."""
    if data[:8] != MAGIC:
        raise ValueError("it is empty" if not data.strip(b"\0") else "it is no flight record")
    if len(data) < HEADER_END:
        raise ValueError(f"it ends within its header, after {len(data)} bytes")
    try:
        header = json.loads(text_of(data[HEADER_AT:MOMENTS_AT]))
    except (ValueError, RecursionError) as error:
        raise ValueError("its header is damaged") from error
    if not isinstance(header, dict) or "version" not in header:
        raise ValueError("its header is damaged")
    if header["version"] != VERSION:
        raise ValueError(
            f"it has version {header['version']} of the format, and this ringcomm reads version "
            f"{VERSION}"
        )
    return header


def read_ring(data: bytes, newest: int | None = None, lines: Sequence[str] = ()) -> GroupRecord:
    """Read a ring file. Raises ValueError where even its header cannot be used.

    `newest`: only so many operations, as it takes less time. `lines`: those of the program, by
    their numbers. A file may be cut short, and any record half-written: the others are used, and
    `remarks` says what is missing.
    """
    header = {**header_of(data), "lines": lines}
    _, begun, steady, wall = CLOCKS.unpack_from(data)
    try:
        header["ticks"] = ticks = Ticks(data)
        others = {int(number): name for number, name in dict(header.get("registered", {})).items()}
        header["by_number"] = dict(enumerate(header["algorithms"])) | others
        record = GroupRecord(
            job=str(header["job"]),
            pid=int(header["pid"]),
            host=str(header["host"]),
            rank=int(header["rank"]),
            global_ranks=ranks_of(data, header),
            group=str(header["group"]),
            steady_ns=steady,
            wall_ns=wall,
            device=bool(header.get("device")),
            meeting=int(header.get("meeting", 0)),
            begun=begun,
            capacity=int(header["capacity"]),
            failure=text_of(data[FAILURE_AT:HEADER_END]),
            ringcomm=str(header.get("ringcomm", "")),
            torch=str(header.get("torch", "")),
        )
        operations = list(operations_of(data, header, record, newest))
        waits_at = int(header["waits_at"])
        record.totals = totals_of(data, header, ticks)
    except DAMAGE as error:
        raise ValueError("its header is damaged") from error
    record.operations = sorted(operations, key=lambda operation: operation.number)
    record.process = processes.read(record.pid, data[waits_at + 8 * record.size :])
    (record.seen_ns,) = struct.unpack_from("<q", data, SEEN_AT)
    record.traffic = TRAFFIC.unpack_from(data, TRAFFIC_AT)
    record.has_left = data[LEFT_AT] == 1
    whole = data[waits_at : waits_at + 8 * record.size]
    if len(whole) == 8 * record.size:
        record.waits_ns = struct.unpack(f"<{record.size}Q", whole)
    return record


def ranks_of(data: bytes, header: dict[str, Any]) -> tuple[int, ...]:
    """Return the global ranks of a group's members, of whom the header's rank is one."""
    ranks = struct.unpack_from(f"<{int(header['size'])}i", data, int(header["ranks_at"]))
    if len({*ranks}) < len(ranks):
        raise ValueError("a rank is named twice")
    if not 0 <= int(header["rank"]) < len(ranks):
        raise ValueError(f"rank {header['rank']} of {len(ranks)}")
    return ranks


def totals_of(data: bytes, header: dict[str, Any], ticks: Ticks) -> dict[str, Total]:
    """Return the totals of the collectives that were called; none of a file cut short before."""
    totals = {}
    for index, name in enumerate(header["collectives"]):
        at = int(header["totals_at"]) + index * TOTALS.size
        if at + TOTALS.size <= len(data) and (count := TOTALS.unpack_from(data, at)[0]):
            _, size, time = TOTALS.unpack_from(data, at)
            totals[str(name)] = Total(count, size, time * ticks.length * 1e-9)
    return totals


def process_in(path: Path) -> tuple[str, Process]:
    """Return the host and the process of a ring file. Raises OSError; "" for what is none."""
    with path.open("rb") as file:
        try:
            header = header_of(file.read(HEADER_END))
            file.seek(int(header["waits_at"]) + 8 * int(header["size"]))
            return str(header["host"]), processes.read(int(header["pid"]), file.read())
        except DAMAGE:
            return "", Process(0)


def operations_of(
    data: bytes, header: dict[str, Any], record: GroupRecord, newest: int | None = None
) -> Iterator[Operation]:
    """Yield those of a ring file that are whole."""
    begin, step, count = (int(header[key]) for key in ("records_at", "record_bytes", "capacity"))
    if step < RECORD.size or begin < HEADER_END or count < 1:
        raise ValueError("records overlap, or there are none")
    there = min(max(len(data) - begin, 0) // step, count)
    torn = 0
    oldest = 0 if newest is None else max(record.begun - newest, 0)
    wanted = range(there) if newest is None else range(oldest, record.begun)
    for number in wanted:
        at = begin + number % count * step
        if at + step > begin + there * step:
            continue
        fields = RECORD.unpack_from(data, at)
        if fields[0] == 0:
            continue  # free, or being written
        try:
            yield decode(fields, header, record)
        except (ValueError, IndexError):
            torn += 1
    if there < count:
        record.remarks.append(
            f"{record_name(record)} is cut short: {there} of {count} records are left"
        )
    if torn:
        record.remarks.append(
            f"{record_name(record)} has {counted(torn, 'half-written operation')}"
        )


def record_name(record: GroupRecord) -> str:
    return f"the record of rank {record.global_rank} in group {record.group}"


def decode(fields: tuple[int, ...], header: dict[str, Any], record: GroupRecord) -> Operation:
    """Decode a record. Raises ValueError or IndexError where it contradicts itself."""
    number, sequence, kind, elements, splits, layout, plan = fields[:7]
    called, began, ended, sent, waited, longest, peer, resent, state, line = fields[8:18]
    lines = header["lines"]
    op, root = kind >> 16 & 0xFF, kind >> 24 & NOBODY
    collective = header["collectives"][kind & 0xFF]
    called_ns, began_ns, ended_ns = (header["ticks"].ns(time) for time in (called, began, ended))
    times = [time for time in (called_ns, began_ns, ended_ns) if time]
    if times != sorted(times) or number > record.begun + 1 or peer >= record.size:
        raise ValueError("half-written")
    if times and max(record.steady_ns - times[0], times[-1] - record.steady_ns) > LONGEST_NS:
        raise ValueError("half-written")
    if (collective in MESSAGES) != (sequence == 0) or (root != NOBODY and root >= record.size):
        raise ValueError("half-written")
    return Operation(
        number,
        sequence,
        collective,
        dtype=header["dtypes"][kind >> 8 & 0xFF],
        op=None if op == 0xFF else header["ops"][op],
        root=None if root == NOBODY else root,
        elements=elements,
        splits=splits,
        layout=layout,
        algorithm=header["by_number"].get(plan & 0xFF, ""),
        called_ns=called_ns,
        began_ns=began_ns,
        ended_ns=ended_ns,
        sent=sent,
        waited_ns=waited,
        longest_ns=longest,
        longest_peer=None if peer < 0 else peer,
        resent=resent,
        state=STATES[state],
        purpose=kind >> 48 & 0xFF,
        line=lines[line - 1] if 0 < line <= len(lines) else "",
    )


class PlainUnpickler(pickle.Unpickler):
    """Takes numbers, texts, lists and dicts: a file from elsewhere must run no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_pickle(path: Path) -> list[GroupRecord]:
    """Read what ringcomm wrote into a `rank_<N>` file. Raises OSError, and ValueError with why."""
    try:
        dump = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except OSError:
        raise
    except Exception as error:  # pickle raises whatever the bytes make it raise
        raise ValueError(f"it is no plain pickle ({error})") from error
    try:
        headers = dump["ringcomm"]["records"]
        records = [GroupRecord(**{key: header[key] for key in HEADER}) for header in headers]
        for entry in dump["entries"]:
            facts = entry["ringcomm"]
            operation = Operation(**{key: facts[key] for key in FIELDS})
            records[facts["record"]].operations.append(operation)
        for record in records:
            if not 0 <= record.rank < len({*record.global_ranks}) == record.size:
                raise IndexError(record.rank)
            record.operations.sort(key=lambda operation: operation.number)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError("it has no facts of ringcomm's") from error
    for record in records:
        record.source = path.name
    return records


@dataclass
class Folder:
    """The contents of a folder: records, and sentences on what could not be used."""

    records: list[GroupRecord] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)  # global ranks of files that were left out


def temporary_folders() -> Path:
    """Return where records lie that no RINGCOMM_TRACE sends elsewhere: a folder for each job."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir()) / f"ringcomm-{os.getuid()}"


def newest_folder(named: Path | None) -> Path:
    """Return the folder that is named, else RINGCOMM_TRACE, else that of this user's latest job.

    Raises FileNotFoundError where there is none.
    """
    own, trace = temporary_folders(), os.environ.get("RINGCOMM_TRACE", "off")
    if named is None and trace not in ("", "off"):
        return Path(trace)
    if named is not None and named.resolve() != own.resolve():
        return named
    jobs = [folder for folder in own.glob("*") if folder.is_dir()]
    if not jobs or own.is_symlink() or own.stat().st_uid != os.getuid():
        raise FileNotFoundError(
            f"no job of yours has left flight records in {own}: give the folder that the job's "
            "log or its RINGCOMM_TRACE names, on a host where its ranks ran"
        )
    return max(jobs, key=lambda folder: folder.stat().st_mtime)


def read_folder(path: Path) -> Folder:
    """Read the ring files under a folder, and the pickles of ranks that left no ring file.

    Raises OSError where there is no such folder. `remarks` names the files that cannot be read.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder")
    folder = Folder()
    rings = sorted(path.rglob("*.ring"))
    for file in rings:
        read_ns = time.monotonic_ns()
        try:
            record = read_ring(file.read_bytes(), lines=lines_beside(file))
        except (OSError, ValueError) as error:
            folder.remarks.append(f"{file.name} is left out: {error}")
            rank = file.name.removeprefix("rank").partition("-")[0]
            folder.unread |= {int(rank)} if rank.isdecimal() else set()
            continue
        record.source, record.read_ns, record.at = file.name, read_ns, line_beside(file, record)
        record.often = next(iter(lines_beside(file, "often")), "")
        folder.records.append(record)
        folder.remarks += record.remarks
    have = {record.global_rank for record in folder.records}
    for file in sorted(path.rglob("rank_*")):
        rank = file.name.removeprefix("rank_")
        if not rank.isdigit() or int(rank) in have or not file.is_file():
            continue
        try:
            records = read_pickle(file)
        except (OSError, ValueError) as error:
            folder.remarks.append(f"{file.name} is left out: {error}")
            continue
        folder.records += records
    return folder


def beside(ring: Path, suffix: str) -> Path:
    """Return the path of another file that a process leaves beside its ring files."""
    return ring.with_name(f"{ring.stem.rpartition('-')[0]}.{suffix}")


def lines_beside(ring: Path, suffix: str = "lines") -> list[str]:
    """Return the lines of the program that a process left there."""
    try:
        text = beside(ring, suffix).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()


FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')


def line_beside(ring: Path, record: GroupRecord) -> str:
    """Return the line of the program at which a process left its stacks there.

    Stacks are of no use where the group went on after them.
    """
    file = beside(ring, "stacks")
    try:
        text, written_ns = file.read_text(errors="replace"), file.stat().st_mtime_ns
    except OSError:
        return ""
    if written_ns < record.wall_ns + last_ns(record) - record.steady_ns:
        return ""
    _, _, main = text.partition("thread MainThread:\n")
    return innermost(FRAME.findall(main.partition("\n\nthread ")[0]))


def by_job(records: list[GroupRecord]) -> dict[str, list[GroupRecord]]:
    """Sort records by the job that wrote them: the latest job comes last.

    Processes that had a group together were of one job. Others of the same name were of another
    one, "train/0 (2)", which may have left its records in the same folder.
    """
    jobs: dict[str, list[GroupRecord]] = {}
    times: dict[str, int] = {}
    for parts in sorted(components(records), key=lambda parts: parts[0].wall_ns):
        name = parts[0].job
        times[name] = nth = times.get(name, 0) + 1
        jobs[name if nth == 1 else f"{name} ({nth})"] = parts
    return dict(sorted(jobs.items(), key=lambda item: item[1][-1].wall_ns))


def components(records: list[GroupRecord]) -> Iterator[list[GroupRecord]]:
    """Yield the records of processes that groups connect, by time."""
    leads: dict[Hashable, Hashable] = {}

    def lead(node: Hashable) -> Hashable:
        while (above := leads.setdefault(node, node)) != node:
            node = above
        return node

    ordered = sorted(records, key=lambda record: record.wall_ns)
    for record in ordered:
        leads[lead((record.job, record.host, record.pid))] = lead((record.job, record.meeting))
    jobs: dict[Hashable, list[GroupRecord]] = {}
    for record in ordered:
        jobs.setdefault(lead((record.job, record.meeting)), []).append(record)
    yield from jobs.values()


def last_ns(record: GroupRecord) -> int:
    """Return when something was last recorded, by the steady clock."""
    times = ((op.called_ns or 0, op.began_ns or 0, op.ended_ns or 0) for op in record.operations)
    return max(itertools.chain([record.steady_ns], *times))
