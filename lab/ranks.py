"""Ranks as processes that wait at a pipe until a test asks them for something.

They are forked from a server that has imported torch and started no thread, so a rank is there in a
fraction of a second, and one set of ranks serves many tests. A rank that fails or hangs breaks the
set: the next test gets a new one. Every process has a deadline of its own, ends when its parent
does, and is ended by its own handle.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lab.limits import limit

T = TypeVar("T")

HOST = "127.0.0.1"
PRELOADED = ["torch.distributed", "torch._dynamo"]  # DDP imports the latter, in seconds
LIFETIME = round(limit(600))  # seconds after which any process here ends, whatever has happened


class RankError(AssertionError):
    """A rank raised, died or did not answer; the message says which and why."""


@dataclass
class Rank:
    """Where a task runs: its first argument. `kept` outlives the task."""

    index: int
    size: int
    store: dist.Store
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.index]


class Ranks:
    """`size` processes, one a rank, started when first asked for something."""

    def __init__(self, size: int, backend: str | None = "ringcomm") -> None:
        """The default group is made of `backend`; None makes none."""
        self.size, self.backend = size, backend
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._store: dist.TCPStore | None = None

    def __call__(self, task: Callable[..., T], *args: Any, seconds: float = 60) -> list[T]:
        """Run `task(Rank, *args)` on every rank at once; return what they returned, by rank.

        Raises RankError with the tracebacks of those that failed; the set then starts afresh.
        """
        if not self._processes:
            self._start()
        answers: dict[int, tuple[bool, Any]] = {}
        try:
            for pipe in self._pipes:
                pipe.send((task, args))
            end = time.monotonic() + limit(seconds)
            while len(answers) < self.size:
                missing = [self._pipes[i] for i in range(self.size) if i not in answers]
                ready = wait(missing, max(0.0, end - time.monotonic()))
                if not ready:
                    raise RankError(self._late(task, answers, seconds))
                for index, pipe in enumerate(self._pipes):
                    if pipe in ready:
                        answers[index] = self._receive(index)
                        if not answers[index][0]:  # the others may wait for it
                            end = min(end, time.monotonic() + limit(5))
            if failures := self._failures(answers):
                raise RankError("\n".join(failures))
        except BaseException:
            self.kill()
            raise
        return [answers[index][1] for index in range(self.size)]

    def _late(self, task: Callable[..., Any], answers: dict[int, Any], seconds: float) -> str:
        missing = [index for index in range(self.size) if index not in answers]
        late = f"ranks {missing} did not finish {task.__name__} within {limit(seconds):.0f} s"
        return "\n".join([late, *self._failures(answers)])

    @staticmethod
    def _failures(answers: dict[int, Any]) -> list[str]:
        return [f"rank {i}: {text}" for i, (good, text) in sorted(answers.items()) if not good]

    def _receive(self, index: int) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = self._pipes[index].recv()
        except (EOFError, OSError):
            self._processes[index].join(1)
            return False, f"died (exit code {self._processes[index].exitcode})"
        return answer

    def _start(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # ranks inherit it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for index in range(self.size):
            ours, theirs = context.Pipe()
            where = (index, self.size, self.backend, self._store.port)
            process = context.Process(target=_serve, args=(theirs, where), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def leave(self) -> None:
        """Let the ranks end by themselves; they destroy their groups. Raises if one does not."""
        if not self._processes:
            return
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + limit(10)
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        self.kill()
        assert codes == [0] * self.size, f"exit codes {codes}"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()  # does nothing to one that has ended
            process.join(5)
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes, self._store = [], [], None


@contextlib.contextmanager
def ranks(size: int, backend: str | None = "ringcomm") -> Iterator[Ranks]:
    """Ranks that end with the context."""
    some = Ranks(size, backend)
    try:
        yield some
        some.leave()
    finally:
        some.kill()


def _serve(pipe: Connection, where: tuple[int, int, str | None, int]) -> None:
    index, size, backend, port = where
    signal.alarm(LIFETIME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the parent's
    torch.set_num_threads(1)
    importlib.import_module("ringcomm")
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    rank = Rank(index, size, store)
    joined = False
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:
            break
        try:
            if backend is not None and not joined:
                join(rank, backend)
                joined = True
            pipe.send((True, task(rank, *args)))
        except BaseException:  # noqa: BLE001  it is the caller's
            pipe.send((False, traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


def join(rank: Rank, backend: str = "ringcomm", seconds: float = limit(60), **options: Any) -> None:
    """Make the default group."""
    dist.init_process_group(
        backend,
        store=rank.store,
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=seconds),
        **options,
    )


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and text of what `function` raises; ("", "") when it raises nothing."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  the test says what it may be
        return type(error).__name__, str(error)
    return "", ""
