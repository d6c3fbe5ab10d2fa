"""`ringcomm top`: where each rank of a running job is, how fast, and who waits for whom.

It reads the flight records in the folder RINGCOMM_TRACE of the job, on any machine that sees it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm._flight.processes import Life, Process, life_of
from ringcomm._flight.records import (
    GroupRecord,
    Operation,
    by_job,
    last_ns,
    newest_folder,
    read_ring,
)
from ringcomm._text import aligned, show_rate, show_seconds, spans
from ringcomm.tools import extra
from ringcomm.tools.trace.job import YOUNG_NS
from ringcomm.tools.world.state import headline, worlds_in

NEWEST = 64  # operations that are read of each group
KEY = re.compile(r"\x1b\[[0-9]*[A-Z~]|.", re.DOTALL)
LOOKS, BARS = 40, "▁▂▃▄▅▆▇█"  # of the history
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
EXAMPLES = (
    "RINGCOMM_TRACE=records torchrun ... train.py    in one terminal",
    "ringcomm top records                            in another one",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "folder",
        type=Path,
        nargs="?",
        help="the job's folder of flight records: else RINGCOMM_TRACE, or your latest job's",
    )
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


# Columns that a narrow screen leaves out, in this order: never who waits for whom.
NARROW = ("host", "group", "ops/s", "rate", "waits", "since", "state")


def short(name: str, cell: str) -> str:
    """Return the operation without its arguments: "all_reduce #412"."""
    return " ".join(cell.split(" ")[:2]) if name == "operation" else cell


def least(cell: str) -> int:
    """Return how narrow a cell can be: one column's name may be folded, but no rank's number."""
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


CULPRIT, WAITS, WELL = "bold red", "yellow", None  # styles of rows


def styles(lines: list[list[str]], now: Look) -> list[str | None]:
    """Return the style of each row: a rank that failed, or that others wait for, stands out.

    A wait of less than a second is a part of every job.
    """
    waiting: set[str] = set()
    blamed: set[str] = set()
    for record in now.records.values():
        late = awaited(record, now)
        call = last_collective(record)
        if late and call and elapsed_ns(record, now.at) - (call.called_ns or 0) >= YOUNG_NS:
            waiting.add(str(record.global_rank))
            blamed |= {str(rank) for rank in late}
    state = COLUMNS.index("state")
    return [
        CULPRIT
        if line[state] in ("failed", "gone") or line[0] in blamed - waiting
        else WAITS
        if line[0] in waiting
        else WELL
        for line in lines
    ]


@dataclass
class View:
    """The part of the table that the screen shows, and the keys that change it."""

    width: int = 120
    height: int = 10**6
    first: int = 0  # of the rows that are shown
    order: int = 0  # of ORDERS
    over: bool = False

    def press(self, key: str) -> None:
        page = max(self.height - 8, 1)
        steps = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -page, "\x1b[6~": page}
        self.over |= key in ("q", "Q")
        self.first = max(self.first + steps.get(key, 0), 0)
        if key == "s":
            self.order, self.first = (self.order + 1) % len(ORDERS), 0

    def part(self, lines: list[list[str]], look: list[str | None]) -> tuple[list[int], str]:
        """Return which rows to show, in their order, and a caption."""
        room = max(self.height - 6, 1)  # the title takes two lines, borders and names four
        order = sorted(range(len(lines)), key=lambda i: ORDERS[self.order][1](lines[i], look[i]))
        if len(lines) <= room:
            self.first = 0
            return order, ""
        self.first = min(self.first, len(lines) - room + 1)
        chosen = order[self.first : self.first + room - 1]
        left = len(lines) - len(chosen)
        return chosen, f"and {left} more: arrows, or --once prints all"


def by_trouble(_line: list[str], look: str | None) -> int:
    return [CULPRIT, WAITS, WELL].index(look)


ORDERS: list[tuple[str, Callable[[list[str], str | None], Any]]] = [
    ("trouble", by_trouble),
    ("rank", lambda line, _look: int(line[0])),
    ("waits", lambda line, _look: -float(line[COLUMNS.index("waits")].rstrip("%"))),
]


def table(before: Look, now: Look, title: str, view: View) -> Any:
    """Return the table of rich for a screen."""
    rich = extra("rich.table")
    every = list(rows(before, now))
    look = styles(every, now)
    chosen, caption = view.part(every, look)
    names, *cells = fitted([COLUMNS, *(every[i] for i in chosen)], view.width)
    made = rich.Table(title=title, caption=caption, expand=False, header_style="bold")
    for at, name in enumerate(names):
        number = name in ("rank", "since", "ops/s", "rate", "waits")
        made.add_column(
            name,
            justify="right" if number else "left",
            no_wrap=name != "waits for",
            min_width=max((least(line[at]) for line in cells), default=0),
        )
    for i, line in zip(chosen, cells, strict=True):
        made.add_row(*line, style=look[i])
    return made


def title_of(folder: Path, now: Look) -> str:
    ranks = {record.global_rank for record in now.records.values()}
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    states = {now.state(record) for record in now.records.values()}
    if states and states <= {"gone", "ended"}:
        how = "ended" if states == {"ended"} else "are gone; no failure was recorded"
        return f"{folder}: all {len(now.lives)} processes {how}"
    worlds = [f"\n{headline(world)}" for world in worlds_in(folder) if world.runs()]
    return (
        f"{folder}: {len(ranks)} ranks at {clock}; ops, bytes and waits of the last look"
        + "".join(worlds[-1:])
    )


def run(options: argparse.Namespace) -> int:
    """Show the screen until `q` or Ctrl-C, once the job has begun.

    Raises ValueError for --once in a folder without flight records.
    """
    folder = newest_folder(options.folder)
    before = look(folder, time.time())
    if options.once or not sys.stdout.isatty():
        if not before.records:
            why = f" that can be read ({before.unread[0]})" if before.unread else ""
            raise ValueError(
                f"{folder} has no flight records{why}: start the job with RINGCOMM_TRACE={folder}"
            )
        time.sleep(options.every)
        print_plain(before, look(folder, time.time()), folder)
        return 0
    live = extra("rich.live")
    view, rates = View(), History()
    with (
        contextlib.suppress(KeyboardInterrupt),
        keys() as pressed,
        live.Live(screen=True, auto_refresh=False) as screen,
    ):
        while not view.over:
            view.width, view.height = screen.console.size
            now = look(folder, time.time())
            rates.add(before, now)
            screen.update(
                table(before, now, f"{title_of(folder, now)}\n{rates.text()}", view)
                if now.records
                else f"{folder} has no flight records yet: waiting for a job that is started with "
                f"RINGCOMM_TRACE={folder} (q quits)",
                refresh=True,
            )
            until = time.monotonic() + options.every
            before = now
            while not view.over and (typed := pressed(until - time.monotonic())):
                for key in KEY.findall(typed):
                    view.press(key)
    return 0


@dataclass
class History:
    """The operations a second of the last looks."""

    rates: list[float] = field(default_factory=list)

    def add(self, before: Look, now: Look) -> None:
        passed = now.at - before.at
        counts = [totals(record)[0] for record in now.records.values()]
        then = [totals(before.records.get(key, now.records[key]))[0] for key in now.records]
        if passed > 0:
            self.rates = [*self.rates, (sum(counts) - sum(then)) / passed][-LOOKS:]

    def text(self) -> str:
        top = max(self.rates, default=0)
        bars = "".join(
            BARS[round(rate / top * (len(BARS) - 1)) if top else 0] for rate in self.rates
        )
        now = self.rates[-1] if self.rates else 0
        return f"{bars} {now:.3g} ops/s   q quits, s sorts, arrows scroll"


def no_key(seconds: float) -> str:
    time.sleep(max(seconds, 0))
    return ""


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Give a function that returns the keys pressed within so many seconds, or ""."""
    if not sys.stdin.isatty():
        yield no_key
        return
    import select
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def pressed(seconds: float) -> str:
        ready = select.select([file], [], [], max(seconds, 0))[0]
        # Nothing to read: the terminal is gone.
        return (os.read(file, 64).decode(errors="replace") or "q") if ready else ""

    try:
        tty.setcbreak(file)
        yield pressed
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def print_plain(before: Look, now: Look, folder: Path) -> None:
    print(title_of(folder, now))
    lines = [COLUMNS, *rows(before, now)]
    if sys.stdout.isatty():
        lines = fitted(lines, shutil.get_terminal_size().columns)
    print("\n".join(aligned(lines)))
