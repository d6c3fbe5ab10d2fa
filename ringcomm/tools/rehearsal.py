"""A training on this machine that meets faults: what `ringcomm elastic rehearse` starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ringcomm.elastic import journal, promises
from ringcomm.tools import cuts

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
START_SECONDS = 600.0  # for the first step
STOPPED_SECONDS = 2.0
ANEW_SECONDS = 1.0  # before a rank that ended is started anew
LOOK_SECONDS = 0.05
FEWEST = 2  # ranks that train, before one has a fault: somebody has to go on
TAIL = 12  # lines of a log


@dataclass
class Rank:
    """One place of the world, and the process that fills it now."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path()
    due: float = 0.0  # when to start it anew
    stopped_until: float = 0.0
    expected: bool = False  # a fault has ended it


@dataclass
class Rehearsal:
    """A training on this machine, and the faults that it meets."""

    options: argparse.Namespace
    folder: Path
    environment: dict[str, str]
    chance: random.Random
    kinds: tuple[str, ...]  # of faults that may come
    ranks: list[Rank] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    connections: int = 0  # that were cut
    uncut: str = ""  # why none was
    filled_at: float | None = None  # since when checkpoints find the disk full
    freed_at: float = 0.0
    failures: list[str] = field(default_factory=list)  # which the journals don't show
    ended: bool = False  # the training has come to its end by itself

    def start(self, rank: Rank) -> None:
        rank.log = self.folder / f"rank{rank.number}-{time.monotonic_ns()}.log"
        command = [sys.executable, self.options.script, *self.options.arguments]
        with rank.log.open("wb") as log:
            rank.process = subprocess.Popen(
                command,
                env={**self.environment, "RANK": str(rank.number)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        rank.expected, rank.stopped_until = False, 0.0

    def run(self, seconds: float) -> None:
        """Train for so long, from the first step on, or until the training ends."""
        end = time.monotonic() + START_SECONDS
        trains = False
        self.ranks = [Rank(number) for number in range(self.options.ranks)]
        for rank in self.ranks:
            self.start(rank)
        due = self._next_fault()
        while (now := time.monotonic()) < end and not (self.ended or self.failures):
            if not trains and any(map(self._trains, self.ranks)):
                trains, end = True, now + seconds
            for rank in self.ranks:
                self._look_after(rank, now)
            self._look_after_disk()
            if now > due:
                due = self._next_fault()
                self._bring_fault(now)
            time.sleep(LOOK_SECONDS)

    def _next_fault(self) -> float:
        return time.monotonic() + self.options.every * self.chance.uniform(0.5, 1.5)

    def _look_after(self, rank: Rank, now: float) -> None:
        process = rank.process
        if process is None:
            if now > rank.due:
                self.start(rank)
            return
        if rank.stopped_until and now > rank.stopped_until:
            rank.stopped_until = 0.0
            process.send_signal(signal.SIGCONT)
        status = process.poll()
        if status is None:
            return
        self._write("ended", process.pid)
        if status == 0 and not rank.expected:
            self.ended = True
        elif not rank.expected:
            self.failures.append(
                f"rank {rank.number} (process {process.pid}) ended with status {status}, and no "
                f"fault has done it; the end of {rank.log}:\n{_tail(rank.log)}"
            )
        rank.process, rank.due = None, now + ANEW_SECONDS

    def _trains(self, rank: Rank) -> bool:
        """Tell whether it has applied a step: it has a journal with something in it."""
        if rank.process is None or rank.expected:
            return False
        path = self.folder / f"{rank.process.pid}.jsonl"
        return path.exists() and path.stat().st_size > 0

    # ---- faults

    def _bring_fault(self, now: float) -> None:
        """Choose a rank and a fault that it can have, if enough others train."""
        training = [rank for rank in self.ranks if self._trains(rank) and not rank.stopped_until]
        living = [rank for rank in self.ranks if rank.process and not rank.stopped_until]
        # A second death could leave no unit whole, so that one waits until all are.
        enough = self.options.ranks if self.options.unit > 1 else FEWEST
        if len(training) < enough:
            return
        rank = self.chance.choice(living)
        for fault in self.chance.sample(self.kinds, len(self.kinds)):
            if self._bring(fault, rank, now):
                self.faults[fault] += 1
                return

    def _bring(self, fault: str, rank: Rank, now: float) -> bool:
        """Bring that fault; returns whether it can be."""
        assert rank.process is not None
        if fault == "cut":
            return self._cut(rank.process.pid)
        if fault == "fill":
            return self._fill(rank.process.pid)
        self._write(fault, rank.process.pid)
        rank.process.send_signal(SIGNALS[fault])
        if fault == "stop":
            rank.stopped_until = now + STOPPED_SECONDS
        else:
            rank.expected = True
        return True

    def _cut(self, pid: int) -> bool:
        """Cut all connections between a rank and the others; the one to the store stays."""
        others = [rank.process.pid for rank in self.ranks if rank.process]
        try:
            count = cuts.cut(pid, others)
        except OSError as error:
            self.uncut = f"the system refuses it ({error.strerror})"
            return False
        if not count:
            self.uncut = "the ranks had no TCP connections to one another"
            return False
        self._write("cut", pid)
        self.connections += count
        return True

    def _fill(self, pid: int) -> bool:
        """Let checkpoints find the disk full until one has. Before that, one has to be written."""
        lines = journal.read(self.folder, journal.CHECKPOINTS)
        written = [line for line in lines if line["what"] == "checkpoint"]
        if self.filled_at is not None or not any(line["began"] > self.freed_at for line in written):
            return False
        self._write("fill", pid)
        self.filled_at = time.monotonic()
        (self.folder / journal.FULL).touch()
        return True

    def _look_after_disk(self) -> None:
        """See that the last checkpoint is whole after one has found the disk full; then free it."""
        if self.filled_at is None:
            return
        lines = journal.read(self.folder, journal.CHECKPOINTS)
        if any(line["what"] == "unsaved" and line["began"] > self.filled_at for line in lines):
            self.failures += promises.look_at_disk(lines)
            (self.folder / journal.FULL).unlink()
            self._write("freed", os.getpid())
            self.filled_at, self.freed_at = None, time.monotonic()

    def _write(self, what: str, pid: int) -> None:
        """Write a fault down beside the journals: the judge has to know it."""
        line = {"at": time.monotonic(), "what": what, "pid": pid}
        with (self.folder / "faults.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    # ---- the end

    def end(self) -> None:
        """End what is left, whole process groups: also the workers of loaders."""
        for rank in self.ranks:
            if rank.process is not None:
                self._write("ended", rank.process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
                rank.process.wait()

    def judge(self) -> promises.Verdict:
        """Judge what was written down, once all have ended, and look at the checkpoints."""
        lines = journal.read(self.folder)
        verdict = promises.judge(lines)
        verdict.broken += promises.look_at_disk(lines)
        return verdict


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()[-TAIL:]
    return "\n".join(f"    {line}" for line in lines)
