"""Ranks as processes that wait at a pipe until they are asked for something, and busy cores.

Every process has a deadline of its own (SIGALRM), ends when its parent does, and is ended by its
own handle. While ranks are not asked for anything they block in a read of the pipe, so the ranks
of several backends can be alive at once and be measured in turn.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, TypeVar

from lab import report
import torch
import torch.distributed as dist

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
HOST = "127.0.0.1"
LIFETIME = 3600.0  # seconds after which any process here ends, whatever has happened


class BenchmarkError(RuntimeError):
    """A rank failed, died or did not answer; the message says which and why."""


@dataclass
class Rank:
    """Where a task runs: tasks get it as their first argument, and keep things in `kept`."""

    backend: str
    index: int
    size: int
    store: Any  # dist.Store
    kept: dict[str, Any] = field(default_factory=dict)


class Ranks:
    """The processes of one backend, one a rank. A context manager: leaving it ends them."""

    def __init__(
        self, backend: str, size: int, lifetime: float = LIFETIME, *, fresh: bool = False
    ) -> None:
        """Start the processes and return at once. `lifetime` is in seconds.

        They are forked from one process that has imported torch and nothing else, which is quick;
        with `fresh` each imports all by itself, so that its memory is that of any program.
        """
        os.environ["OMP_NUM_THREADS"] = "1"  # the ranks inherit it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.backend, self.size = backend, size
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        context: SpawnContext | ForkServerContext = multiprocessing.get_context("forkserver")
        if fresh:
            context = multiprocessing.get_context("spawn")
        context.set_forkserver_preload(["torch.distributed"])
        for index in range(size):
            ours, theirs = context.Pipe()
            where = (backend, index, size, self._store.port)
            process = context.Process(target=_serve, args=(theirs, where, lifetime), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.call(leave, limit=30)
                for pipe in self._pipes:
                    pipe.close()  # the rank that reads it ends by itself
                self._join(10)
        finally:
            for process in self._processes:
                process.kill()  # does nothing to one that has ended
            self._join(10)

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def call(self, task: Callable[..., T], *args: Any, limit: float = 300.0) -> list[T]:
        """Run `task(Rank, *args)` on every rank at once; return what they returned, by rank.

        Raises BenchmarkError when a rank fails, dies, or does not answer in `limit` seconds. The
        others may then be stuck: leave the context.
        """
        for index, pipe in enumerate(self._pipes):
            try:
                pipe.send((task, args))
            except OSError as error:
                raise self._died(index) from error
        answers: dict[int, T] = {}
        end = time.monotonic() + limit
        while len(answers) < self.size:
            missing = [index for index in range(self.size) if index not in answers]
            ready = wait([self._pipes[i] for i in missing], max(0.0, end - time.monotonic()))
            if not ready:
                raise BenchmarkError(
                    f"{self.backend}: ranks {missing} did not finish `{task.__name__}` "
                    f"within {limit:.0f} s"
                )
            for index in missing:
                if self._pipes[index] in ready:
                    answers[index] = self._receive(index)
        return [answers[index] for index in range(self.size)]

    def _receive(self, index: int) -> Any:
        try:
            succeeded, answer = self._pipes[index].recv()
        except (EOFError, OSError) as error:
            raise self._died(index) from error
        if not succeeded:
            raise BenchmarkError(f"{self.backend}, rank {index}: {answer}")
        return answer

    def _died(self, index: int) -> BenchmarkError:
        self._processes[index].join(1)
        code = self._processes[index].exitcode
        why = "its deadline passed" if code == -signal.SIGALRM else f"exit code {code}"
        return BenchmarkError(f"{self.backend}: rank {index} died ({why})")


def slowest(times: list[list[float]]) -> list[float]:
    """Return the time of each call: that of its slowest rank. `times` are by rank."""
    return [max(call) for call in zip(*times, strict=True)]


def main(run: Callable[[Any], None], options: Any) -> int:
    """Run a benchmark; returns its exit status. What a rank met is told in its own words."""
    try:
        run(options)
    except BenchmarkError as error:
        report.progress("")
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as shells have it
    return 0


def prepare(rank: Rank) -> None:
    """Load everything that initialisation needs: what follows it is the backend's own time."""
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


def _serve(pipe: Connection, where: tuple[str, int, int, int], lifetime: float) -> None:
    """Run tasks from `pipe` until it closes: the life of one rank."""
    backend, index, size, port = where
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    end_with_parent(lifetime)
    torch.set_num_threads(1)
    rank = Rank(backend, index, size, dist.TCPStore(HOST, port, wait_for_workers=False))
    while True:
        try:
            task, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, task(rank, *arguments))
        except Exception as error:  # noqa: BLE001  whatever it is, the parent reports it
            answer = (False, describe(error))
        try:
            pipe.send(answer)
        except OSError:
            return


def describe(error: Exception) -> str:
    """Say what went wrong, and where unless that is plain."""
    plain = isinstance(error, (ImportError, AssertionError)) and str(error)
    return str(error) if plain else "".join(traceback.format_exception(error)).rstrip()


def end_with_parent(lifetime: float) -> None:
    """Have the kernel end this process when its parent ends, or after `lifetime` seconds."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(max(1, int(lifetime)))


class BusyCores:
    """A process a core that computes without end. A context manager: leaving it kills them.

    They start stopped; `run` and `pause` let them compute and stop them again.
    """

    _PROGRAM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.alarm(int(sys.argv[2]))
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    sum(range(10000))
"""

    def __init__(self, lifetime: float = LIFETIME) -> None:
        self._lifetime = int(lifetime)
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> BusyCores:
        try:
            for core in sorted(os.sched_getaffinity(0)):
                command = [sys.executable, "-c", self._PROGRAM, str(core), str(self._lifetime)]
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

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)
            if process.poll() is not None:
                raise BenchmarkError(f"a busy core's process ended with {process.returncode}")
