"""`ringcomm top`: where each rank of a running job is, how fast, and who waits for whom.

It reads the flight records in the folder RINGCOMM_TRACE of the job, on any machine that sees it.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm._flight.processes import Life, Process, life_of
from ringcomm._flight.records import GroupRecord, Operation, by_job, last_ns, read_ring
from ringcomm._text import aligned, show_rate, show_seconds, spans
from ringcomm.tools import extra

NEWEST = 64  # operations that are read of each group
COLUMNS = [
    "rank",
    "host",
    "group",
    "operation",
    "state",
    "since",
    "waits for",
    "ops/s",
    "rate",
    "waits",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, help="the job's folder of flight records")
    add("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks")
    add("--once", action="store_true", help="look twice, print the table, and end")


@dataclass
class Look:
    """The contents of the files at one moment, by file; seconds."""

    at: float
    records: dict[str, GroupRecord] = field(default_factory=dict)
    lives: dict[Process, Life] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)  # why a file was left out

    def state(self, record: GroupRecord) -> str:
        """Return what has become of a group; "" while it lives, as far as this host can know."""
        life = self.lives.get(record.process, Life.UNKNOWN)
        if record.failure:
            return "failed"
        if record.has_left:
            return "destroyed" if life == Life.LIVES else "ended"
        return "gone" if life == Life.GONE and not record.process.snapshot else ""


def look(folder: Path, at: float) -> Look:
    """Read all ring files, but leave out those that are damaged or being made."""
    seen = Look(at)
    for path in sorted(folder.rglob("*.ring")):
        try:
            record = read_ring(path.read_bytes(), NEWEST)
            if not record.waits_ns:
                raise ValueError("it is cut short")
        except (OSError, ValueError) as error:
            seen.unread.append(f"{path.name} is left out: {error}")
            continue
        seen.records[str(path)] = record
    jobs = by_job([*seen.records.values()])
    latest = [*jobs.values()][-1] if jobs else []  # as `ringcomm trace` has it
    seen.lives = {record.process: life_of(record.process) for record in latest}
    wanted = {id(record) for record in shown(latest)}
    seen.records = {key: record for key, record in seen.records.items() if id(record) in wanted}
    return seen


def shown(records: list[GroupRecord]) -> Iterator[GroupRecord]:
    """Yield the groups of each process that live; where there is none, its last and largest."""
    processes: dict[tuple[str, Process], list[GroupRecord]] = {}
    for record in records:
        processes.setdefault((record.host, record.process), []).append(record)
    for own in processes.values():
        living = [record for record in own if not record.has_left or record.failure]
        yield from living or [max(own, key=lambda record: (record.size, record.wall_ns))]


def last_collective(record: GroupRecord) -> Operation | None:
    begun = [
        operation
        for operation in record.operations
        if operation.state != "queued" and operation.sequence
    ]
    return begun[-1] if begun else None


def awaited(record: GroupRecord, now: Look) -> list[int]:
    """Return the global ranks that have not called what this one is in, while it lives."""
    current, others = last_collective(record), now.records.values()
    if current is None or current.state != "running" or now.state(record) not in ("", "failed"):
        return []
    late = []
    for other in others:
        theirs = last_collective(other)
        same = (other.job, other.group, other.device) == (record.job, record.group, record.device)
        if (
            same
            and other.rank != record.rank
            and (theirs is None or theirs.sequence < current.sequence)
        ):
            late.append(other.global_rank)
    return sorted(late)


def totals(record: GroupRecord) -> tuple[int, int, float]:
    """Return operations, bytes and seconds of waiting so far."""
    done = record.totals.values()
    counts = (sum(total.operations for total in done), sum(total.bytes for total in done))
    return (*counts, sum(record.waits_ns) * 1e-9)


def rows(before: Look, now: Look) -> Iterator[list[str]]:
    """Yield a row for each rank and group, in the order of ranks: the texts of COLUMNS."""
    passed = max(now.at - before.at, 1e-9)
    order = sorted(
        now.records, key=lambda key: (now.records[key].global_rank, now.records[key].group)
    )
    for key in order:
        record = now.records[key]
        if not record.operations:
            continue
        operation = record.operations[-1]
        running = next((call for call in record.operations if call.state == "running"), None)
        shown = running or operation
        then = totals(before.records.get(key, record))
        counted, size, waited = (new - old for new, old in zip(totals(record), then, strict=True))
        since = (shown.began_ns if running else shown.ended_ns) or shown.called_ns or 0
        age = max(elapsed_ns(record, now.at) - since, 0) * 1e-9
        late = awaited(record, now)
        if late:  # its wait is counted when it ends
            waited += min(age, passed)
        yield [
            str(record.global_rank),
            record.host,
            record.group + (" (device)" if record.device else ""),
            str(shown),
            now.state(record) or shown.state,
            show_seconds(age),
            some_ranks(late),
            f"{counted / passed:.3g}",
            show_rate(size / passed),
            f"{min(waited / passed, 1):.0%}",
        ]


def some_ranks(ranks: list[int]) -> str:
    """Return "0-2 and 5", or how many they are where that is long."""
    text = spans(ranks) if ranks else ""
    return text if len(text) <= 16 else f"{len(ranks)} ranks"


def elapsed_ns(record: GroupRecord, at: float) -> int:
    """Return the time `at`, of time.time(), on the steady clock of the record's host."""
    return max(record.steady_ns + round(at * 1e9) - record.wall_ns, last_ns(record))


NARROW = ("host", "group", "ops/s")  # columns that a narrow screen leaves out, in this order


def short(name: str, cell: str) -> str:
    """Return the operation without its arguments: "all_reduce #412"."""
    return " ".join(cell.split(" ")[:2]) if name == "operation" else cell


def least(cell: str) -> int:
    """Return how narrow a cell can be: one column's name may be folded."""
    return len("waits") if cell == "waits for" else len(cell)


def fitted(lines: list[list[str]], width: int) -> list[list[str]]:
    """Return a table, its columns' names first, with what fits into so many characters."""
    borders = 3 * len(lines[0]) + 1

    def fits() -> bool:
        columns = zip(*lines, strict=True)
        return borders + sum(max(map(least, column)) for column in columns) <= width

    if not fits():
        lines = [[short(*pair) for pair in zip(COLUMNS, line, strict=True)] for line in lines]
    for name in NARROW:
        if fits():
            break
        at = lines[0].index(name)
        lines = [[*line[:at], *line[at + 1 :]] for line in lines]
        borders -= 3
    return lines


def shortened(lines: list[list[str]], height: int) -> tuple[list[list[str]], int]:
    """Return the rows for a screen of so many lines, and how many others there are.

    Ranks that failed or wait come first where not all have room.
    """
    room = max(height - 6, 1)  # the title takes two lines, borders and names four
    if len(lines) <= room:
        return lines, 0
    chosen = sorted(range(len(lines)), key=lambda i: (not is_slow(lines[i]), i))[: room - 1]
    return [lines[i] for i in sorted(chosen)], len(lines) - len(chosen)


def is_slow(row: list[str]) -> bool:
    return row[COLUMNS.index("state")] in ("failed", "gone") or bool(
        row[COLUMNS.index("waits for")]
    )


def table(before: Look, now: Look, title: str, width: int = 120, height: int = 10**6) -> Any:
    """Return the table of rich for a screen of so many columns and lines."""
    rich = extra("rich.table")
    shown, others = shortened(list(rows(before, now)), height)
    caption = f"and {others} more: --once prints all" if others else None
    names, *cells = fitted([COLUMNS, *shown], width)
    made = rich.Table(title=title, caption=caption, expand=False, header_style="bold")
    for name in names:
        number = name in ("rank", "since", "ops/s", "rate", "waits")
        made.add_column(name, justify="right" if number else "left", no_wrap=name != "waits for")
    for row, line in zip(shown, cells, strict=True):
        made.add_row(*line, style="bold yellow" if is_slow(row) else None)
    return made


def title_of(folder: Path, now: Look) -> str:
    ranks = {record.global_rank for record in now.records.values()}
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    states = {now.state(record) for record in now.records.values()}
    if states and states <= {"gone", "ended"}:
        how = "ended" if states == {"ended"} else "are gone; no failure was recorded"
        return f"{folder}: all {len(now.lives)} processes {how}"
    return f"{folder}: {len(ranks)} ranks at {clock}; ops, bytes and waits of the last look"


def run(options: argparse.Namespace) -> int:
    """Show the screen until Ctrl-C. Raises ValueError where the folder has no flight records."""
    before = look(options.folder, time.time())
    if not before.records:
        why = f" that can be read ({before.unread[0]})" if before.unread else ""
        raise ValueError(
            f"{options.folder} has no flight records{why}: start the job with RINGCOMM_TRACE="
            f"{options.folder}"
        )
    if options.once or not sys.stdout.isatty():
        time.sleep(options.every)
        print_plain(before, look(options.folder, time.time()), options.folder)
        return 0
    live = extra("rich.live")
    with (
        contextlib.suppress(KeyboardInterrupt),
        live.Live(screen=True, auto_refresh=False) as screen,
    ):
        while True:
            time.sleep(options.every)
            now = look(options.folder, time.time())
            title, (width, height) = title_of(options.folder, now), screen.console.size
            screen.update(table(before, now, title, width, height), refresh=True)
            before = now
    return 0


def print_plain(before: Look, now: Look, folder: Path) -> None:
    print(title_of(folder, now))
    lines = [COLUMNS, *rows(before, now)]
    if sys.stdout.isatty():
        lines = fitted(lines, shutil.get_terminal_size().columns)
    print("\n".join(aligned(lines)))
