"""How busy other processes keep this host while something is measured on it.

The kernel counts the CPU time of everything that runs (/proc/stat), and that of each process. What
this job's own processes did not use, others did, and they disturb a figure taken meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
MOST = 0.1  # of the cores that ranks need; where others use more, figures are in doubt
SHORTEST = 0.1  # seconds: the kernel counts in steps of some 10 ms, which say nothing of less
IDLE, STEAL = (3, 4), 7  # columns of /proc/stat: waiting for a disk is idle time, too
INTERRUPTS = (5, 6)


@dataclass(frozen=True)
class Counters:
    """The kernel's counters at a moment, in seconds; None: this machine does not tell."""

    when: float
    busy: float | None  # CPU time of all processes
    every: float | None  # that, and idle time
    own: float  # CPU time of this job's processes


@dataclass(frozen=True)
class Span:
    """The CPU time that was used between two samples, in seconds."""

    seconds: float = 0.0
    busy: float | None = 0.0
    own: float = 0.0

    @property
    def others(self) -> float | None:
        """How many cores other processes used, on average; None: unknown."""
        if self.busy is None or self.seconds < SHORTEST:
            return None
        return max(0.0, self.busy - self.own) / self.seconds

    def share(self, cores: float) -> float | None:
        """Return what others used as a share of the cores that the ranks need."""
        return None if self.others is None or cores <= 0 else self.others / cores


def between(before: Counters, after: Counters) -> Span:
    """Return what happened between two samples of one host."""
    seconds, own = after.when - before.when, max(0.0, after.own - before.own)
    if None in (before.busy, before.every, after.busy, after.every):
        return Span(seconds, None, own)
    assert before.busy is not None
    assert after.busy is not None
    assert before.every is not None
    assert after.every is not None
    # Counters that stand still or fall back are made up, as those of some containers.
    if after.every <= before.every or after.busy < before.busy:
        return Span(seconds, None, own)
    return Span(seconds, after.busy - before.busy, own)


def together(spans: Iterable[Span]) -> Span:
    """Return all spans as one; where one does not tell, neither does the whole."""
    whole = list(spans)
    known = [span.busy for span in whole if span.busy is not None]
    busy = sum(known) if len(known) == len(whole) else None
    return Span(sum(span.seconds for span in whole), busy, sum(span.own for span in whole))


def parse(stat: str, cores: Collection[int] = ()) -> tuple[float, float] | None:
    """Return the busy and the whole CPU seconds that /proc/stat tells; None where it tells none.

    They are those of `cores`, or of all cores where it does not list these. Interrupts are left
    out: they serve the job's own messages as well, and the kernel says for neither whom.
    """
    lines = {words[0]: words[1:] for words in map(str.split, stat.splitlines()) if words}
    names = [f"cpu{core}" for core in cores]
    chosen = names if names and all(name in lines for name in names) else ["cpu"]
    busy = every = 0
    for name in chosen:
        words = lines.get(name, [])[: STEAL + 1]  # what follows is in these already
        if len(words) <= max(IDLE) or not all(word.isdigit() for word in words):
            return None
        numbers = [int(word) for word in words]
        every += sum(numbers)
        busy += sum(n for at, n in enumerate(numbers) if at not in (*IDLE, *INTERRUPTS))
    tick = os.sysconf("SC_CLK_TCK")
    return (busy / tick, every / tick) if every else None


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used; 0 where it has ended."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it
    return 0.0


def count(pids: Iterable[int], cores: Collection[int] = (), stat: Path = STAT) -> Counters:
    """Take a sample; `pids` are the job's processes, `cores` those they may use."""
    try:
        told = parse(stat.read_text(errors="replace"), cores)
    except OSError:
        told = None
    busy, every = told or (None, None)
    return Counters(time.monotonic(), busy, every, sum(map(cpu_seconds, pids)))


def in_doubt(share: float | None) -> bool:
    """Tell whether others used so much that a figure may be theirs."""
    return share is not None and share > MOST


def says(others: float | None, cores: float) -> str:
    """Say what other processes used of so many cores, without a period."""
    if others is None:
        return "How much of the CPU other processes used meanwhile is unknown"
    of = f"{cores:g} core{'s' * (cores != 1)}"
    return f"Other processes used {others:.2g} of {of} meanwhile"
