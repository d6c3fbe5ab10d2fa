"""`ringcomm elastic rehearse`: train on this machine while ranks are killed, stopped and started.

Your script runs as it is, with so many ranks. Faults come at random, by a seed. At the end one page
says whether your training kept the promises of docs/elastic.md, and what the faults cost it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

EXAMPLES = (
    "ringcomm elastic rehearse train.py --epochs 90",
    "ringcomm elastic rehearse --ranks 4 --minutes 5 --seed 7 train.py",
    "ringcomm elastic rehearse --ranks 4 --unit 2 sharded.py",
)
FAULTS = ("kill", "stop", "leave")
START_SECONDS = 600.0  # for the first step
STOPPED_SECONDS = 2.0
ANEW_SECONDS = 1.0  # before a rank that ended is started anew
LOOK_SECONDS = 0.05
FEWEST = 2  # ranks that train, before one has a fault: somebody has to go on
TAIL = 12  # lines of a log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=3)
    add("--unit", type=int, default=1, help="of a sharded model: what the script gives to join")
    add("--minutes", type=float, default=5.0)
    add("--every", type=float, default=5.0, metavar="SECONDS", help="between faults, about")
    add("--seed", type=int, help="of the faults (default: another one each time)")
    add("--keep", metavar="FOLDER", help="keep the ranks' logs and journals there")
    add("script", help="your training, and its arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


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
    ranks: list[Rank] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # of ranks that no fault has ended
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
        if status == 0 and not rank.expected:
            self.ended = True
        elif not rank.expected:
            self.failures.append(
                f"rank {rank.number} (process {process.pid}) ended with status {status}, and no "
                f"fault has done it; the end of {rank.log}:\n{_tail(rank.log)}"
            )
        rank.process, rank.due = None, now + ANEW_SECONDS

    def _bring_fault(self, now: float) -> None:
        """Choose a fault and a rank, if enough others train."""
        training = [rank for rank in self.ranks if self._trains(rank) and not rank.stopped_until]
        living = [rank for rank in self.ranks if rank.process and not rank.stopped_until]
        # A second death could leave no unit whole, so that one waits until all are.
        enough = self.options.ranks if self.options.unit > 1 else FEWEST
        if len(training) < enough:
            return
        fault, rank = self.chance.choice(FAULTS), self.chance.choice(living)
        assert rank.process is not None
        self.faults[fault] += 1
        if fault == "stop":
            rank.stopped_until = now + STOPPED_SECONDS
            rank.process.send_signal(signal.SIGSTOP)
            return
        rank.expected = True
        rank.process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGTERM)

    def _trains(self, rank: Rank) -> bool:
        """Tell whether it has applied a step: it has a journal with something in it."""
        if rank.process is None or rank.expected:
            return False
        path = self.folder / f"{rank.process.pid}.jsonl"
        return path.exists() and path.stat().st_size > 0

    def end(self) -> None:
        """End what is left, whole process groups: also the workers of loaders."""
        for rank in self.ranks:
            if rank.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
                rank.process.wait()


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()[-TAIL:]
    return "\n".join(f"    {line}" for line in lines)


def page(rehearsal: Rehearsal, verdict: Any, seed: int, out: IO[str]) -> bool:
    """Print the page; returns whether all was well."""
    faults = ", ".join(f"{rehearsal.faults[name]} x {name}" for name in FAULTS)

    def tell(text: str) -> None:
        print(text, file=out)

    tell(f"faults           {faults} (seed {seed})")
    tell(f"steps            {verdict.steps} in {verdict.seconds:.0f} s")
    tell(f"a step           {verdict.usual * 1e3:.1f} ms usually")
    tell(f"longest pause    {verdict.longest * 1e3:.0f} ms between two steps")
    tell(f"computed again   {verdict.aborted} steps, by a rank each")
    tell(f"changes          {verdict.changes}")
    if rehearsal.ended:
        tell("The training came to its end: give it more to do for a longer rehearsal.")
    for problem in [*verdict.broken[:20], *rehearsal.failures]:
        tell(f"BROKEN: {problem}")
    well = not (verdict.broken or rehearsal.failures)
    if well:
        tell(
            "Kept: every step was applied by all members or none, with equal parameters; no batch "
            "was used twice, and none is missing."
        )
    return well


def run(options: argparse.Namespace) -> int:
    from ringcomm.elastic import journal, promises  # with torch
    from ringcomm.elastic.store import serve

    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    served = serve("127.0.0.1", 0)
    assert served is not None, "a free port is always there"
    folder = Path(options.keep or tempfile.mkdtemp(prefix="ringcomm-rehearsal-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if next(folder.glob("*.jsonl"), None):
        print(
            f"{folder} has the journals of another rehearsal, which would be judged with this one: "
            "give --keep another folder",
            file=sys.stderr,
        )
        return 1
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "RINGCOMM_ELASTIC": f"127.0.0.1:{served.port}",
        "RINGCOMM_ELASTIC_RUN": f"rehearsal-{os.getpid()}",
        "RINGCOMM_ELASTIC_JOURNAL": str(folder),
        "WORLD_SIZE": str(options.ranks),
    }
    rehearsal = Rehearsal(options, folder, environment, random.Random(seed))
    try:
        rehearsal.run(options.minutes * 60)
    finally:
        rehearsal.end()
    well = page(rehearsal, promises.judge(journal.read(folder)), seed, sys.stdout)
    if options.keep is None and well:
        shutil.rmtree(folder)
    else:
        print(f"The ranks' logs and journals are in {folder}")
    return int(not well)
