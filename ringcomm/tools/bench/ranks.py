"""Ranks as processes that wait at a pipe until they are asked for something.

They are forked from a server that has imported torch and started no thread, so a rank is there in a
fraction of a second, and one set of ranks serves many tasks. While ranks are not asked for anything
they block in a read, so several sets can be alive and be measured in turn. Every process has a
deadline of its own, ends when its parent does, and is ended by its own handle.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

HOST = "127.0.0.1"
PR_SET_PDEATHSIG = 1
GRACE = 5  # seconds that the others have when a rank has failed: they may wait for it


class RankError(AssertionError):
    """A rank raised, died or did not answer; the message says which and why."""


@dataclass
class Rank:
    """Where a task runs: its first argument. `kept` outlives the task."""

    index: int
    size: int
    store: Any  # dist.Store
    backend: str = "ringcomm"
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.index]


class Ranks:
    """`size` processes, one a rank, started when first asked for something.

    A rank that fails or hangs breaks the set: the next task gets a new one.
    """

    # Nothing else, so that memory is that of the backend.
    preloaded: ClassVar = ["torch.distributed"]
    # Ranks call this before their first task, with the backend's name. None: they call nothing.
    joins: ClassVar[Callable[[Rank, str], None] | None] = None
    fresh = False  # each imports all by itself, so that its memory is that of any program
    seconds = 300.0  # for a task, unless the call says more
    lifetime = 3600.0  # seconds after which a process ends, whatever has happened
    slower: float = 1.0  # times as long may all take as on an idle machine

    def __init__(self, size: int, backend: str | None = "ringcomm") -> None:
        """The default group is made of `backend`; None makes none."""
        self.size, self.backend = size, backend
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._store: dist.TCPStore | None = None

    def __call__(self, task: Callable[..., T], *args: Any, seconds: float | None = None) -> list[T]:
        """Run `task(Rank, *args)` on every rank at once; return what they returned, by rank.

        Raises RankError with the tracebacks of those that failed.
        """
        allowed = self.slower * (seconds or self.seconds)
        try:
            self.begin(task, *args)
            answers = self.answers(allowed, self.slower * GRACE)
            said = [self._says(i, a[1]) for i, a in sorted(answers.items()) if not a[0]]
            if late := [index for index in range(self.size) if index not in answers]:
                told = f"ranks {late} did not finish `{task.__name__}` within {allowed:.0f} s"
                said.insert(0, f"{self.backend}: {told}" if self.backend else told)
            if said:
                raise RankError("\n".join(said))
        except BaseException:
            self.kill()
            raise
        return [answers[index][1] for index in range(self.size)]

    def begin(self, task: Callable[..., Any], *args: Any) -> None:
        """Have every rank begin a task; `answers` has what comes of it."""
        if not self._processes:
            self.start()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it has died: its answer says so
                pipe.send((task, args))

    def answers(self, seconds: float, grace: float | None = None) -> dict[int, tuple[bool, Any]]:
        """Return what ranks answer within `seconds`: success, and the result or what they say.

        The others have `grace` seconds more once a rank has failed.
        """
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + seconds
        while len(answers) < self.size:
            missing = [index for index in range(self.size) if index not in answers]
            ready = wait([self._pipes[i] for i in missing], max(0.0, end - time.monotonic()))
            if not ready:
                break
            for index in missing:
                if self._pipes[index] in ready:
                    answers[index] = self._receive(index)
                    if grace is not None and not answers[index][0]:
                        end = min(end, time.monotonic() + grace)
        return answers

    def _says(self, index: int, text: str) -> str:
        return f"{self.backend}, rank {index}: {text}" if self.backend else f"rank {index}: {text}"

    def _receive(self, index: int) -> tuple[bool, Any]:
        try:
            good, answer = self._pipes[index].recv()
        except (EOFError, OSError):
            self._processes[index].join(1)
            code = self._processes[index].exitcode
            late = code == -signal.SIGALRM
            return False, f"died ({'its deadline passed' if late else f'exit code {code}'})"
        return good, answer if good else self.words_of(*answer)

    @staticmethod
    def words_of(text: str, trace: str, plain: bool) -> str:
        """Return what is told of an exception; `plain` ones say all in their text."""
        return trace

    def start(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # ranks inherit it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context: Any = multiprocessing.get_context("spawn" if self.fresh else "forkserver")
        context.set_forkserver_preload(self.preloaded)
        for index in range(self.size):
            ours, theirs = context.Pipe()
            where = (index, self.size, self.backend, self._store.port)
            joins = type(self).joins if self.backend is not None else None
            args = (theirs, where, joins, self.lifetime)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def leave(self) -> None:
        """Let the ranks end by themselves; they destroy their groups. Raises if one does not."""
        codes = self.end()
        assert all(code == 0 for code in codes), f"exit codes {codes}"

    def end(self) -> list[int | None]:
        """Let the ranks end, and kill those that do not; returns their exit codes until then."""
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + 10 * self.slower
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        self.kill()
        return codes

    def kill(self) -> None:
        for process in self._processes:
            process.kill()  # does nothing to one that has ended
        for process in self._processes:
            process.join(5)
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes, self._store = [], [], None


def end_with_parent(lifetime: float) -> None:
    """Have the kernel end this process when its parent ends, or after `lifetime` seconds."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(max(1, round(lifetime)))


def _serve(
    pipe: Connection,
    where: tuple[int, int, str | None, int],
    joins: Callable[[Rank, str], None] | None,
    lifetime: float,
) -> None:
    """Be a rank, from its start until `pipe` closes."""
    index, size, backend, port = where
    end_with_parent(lifetime)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the parent's
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    serve(pipe, Rank(index, size, store, backend or ""), joins)
    if dist.is_initialized():
        dist.destroy_process_group()


def serve(pipe: Connection, rank: Rank, joins: Callable[[Rank, str], None] | None) -> None:
    """Run tasks from `pipe` until it closes, `joins` before the first."""
    while True:
        try:
            task, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if joins:
                joins(rank, rank.backend)
                joins = None
            pipe.send((True, task(rank, *args)))
        except BaseException as error:  # noqa: BLE001  it is the caller's
            plain = isinstance(error, (ImportError, AssertionError)) and bool(str(error))
            with contextlib.suppress(OSError):  # no process is there to read it
                pipe.send((False, (str(error), traceback.format_exc().rstrip(), plain)))
