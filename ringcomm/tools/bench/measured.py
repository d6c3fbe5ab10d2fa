"""Ranks that are measured: how they meet and leave; and cores that are kept busy meanwhile."""

from __future__ import annotations

import datetime
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist

from ringcomm.tools.bench.ranks import Rank, Ranks

LIFETIME = 3600.0  # seconds after which any process here ends, whatever has happened


class BenchmarkError(RuntimeError):
    """Something else than a rank failed; the message says what and why."""


class Measured(Ranks):
    """The ranks of one backend for a whole run. A context manager: they live in it."""

    def __init__(
        self, size: int, backend: str, lifetime: float = LIFETIME, *, fresh: bool = False
    ) -> None:
        """The processes end after `lifetime` seconds, whatever has happened."""
        super().__init__(size, backend)
        self.lifetime, self.fresh = lifetime, fresh

    def __enter__(self) -> Measured:
        """Start the processes, and return at once."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self(leave, seconds=30)
                self.end()
        finally:
            self.kill()

    @staticmethod
    def words_of(text: str, trace: str, plain: bool) -> str:
        return text if plain else trace


def slowest(times: list[list[float]]) -> list[float]:
    """Return the time of each call: that of its slowest rank. `times` are by rank."""
    return [max(call) for call in zip(*times, strict=True)]


def prepare(rank: Rank) -> None:
    """Load everything that initialisation needs, so that it takes only the backend's own time."""
    if rank.backend != "ringcomm":
        return
    if not find_spec("ringcomm"):
        raise ImportError("it is not installed: `pip install --no-build-isolation .`")
    importlib.import_module("ringcomm").Options  # noqa: B018  asking for it loads the library


def join(rank: Rank) -> float:
    """Make the default group and meet once; returns the seconds it took this rank."""
    start = time.perf_counter()
    dist.init_process_group(
        rank.backend,
        store=rank.store,
        rank=rank.index,
        world_size=rank.size,
        timeout=datetime.timedelta(seconds=120),
    )
    dist.barrier()
    return time.perf_counter() - start


def spread(rank: Rank) -> None:
    """Go to a core of one's own, or the next best; the kernel is free to move us from there.

    Waking up, ranks may find themselves on one core, and stay together for a tenth of a second.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank.index % len(cores)]})
    os.sched_setaffinity(0, cores)


def leave(rank: Rank) -> None:
    """Let go of everything, then destroy the groups."""
    rank.kept.clear()
    gc.collect()
    if dist.is_initialized():
        if rank.backend != "fake":
            dist.barrier()
        dist.destroy_process_group()


class BusyCores:
    """Processes that compute without end. A context manager: leaving it kills them.

    They start stopped; `run` and `pause` let them compute and stop them again.
    """

    _PROGRAM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.alarm(int(sys.argv[2]))
if sys.argv[1] != "any":
    os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    sum(range(10000))
"""

    def __init__(self, lifetime: float = LIFETIME, count: int | None = None) -> None:
        """Start `count` of them, which may run on any core; None: one on each."""
        self._lifetime = int(lifetime)
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
        self._places = cores if count is None else ["any"] * count
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> BusyCores:
        try:
            for place in self._places:
                command = [sys.executable, "-c", self._PROGRAM, place, str(self._lifetime)]
                self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            for process in self.processes:
                assert process.stdout is not None
                process.stdout.read(1)  # it is on its core now
        except BaseException:
            self.__exit__()
            raise
        self.pause()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # ends a stopped process too
            process.communicate()

    def run(self) -> None:
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def seconds(self) -> float:
        """Return how long they have computed, all together."""
        files = (Path(f"/proc/{process.pid}/schedstat") for process in self.processes)
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)
            if process.poll() is not None:
                raise BenchmarkError(f"a busy core's process ended with {process.returncode}")
