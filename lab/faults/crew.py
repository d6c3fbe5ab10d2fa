"""Ranks on several hosts within a fraction of a second: forked where torch is imported already.

    job = crew().job("train", [0, 0, 1], env={"RINGCOMM_FLOWS": "2"})
    job.until("running")
    os.kill(job.ranks[2].pid, signal.SIGKILL)
    ends = job.ends(10)  # by rank; {"lost": why} where one did not come to its end

Each host has an agent (agent.py) that forks what it is asked for. Every rank talks to the
process that started it over a socket in the file system, which does not care for hosts.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from lab import START
from lab.hosts import Hosts
from lab.limits import limit

FOLDER = Path(__file__).resolve().parent
PROGRAM = "lab.faults.agent"
STARTED = limit(60)  # seconds in which an agent has imported torch, or a rank begun
# No rank needs more of it: what lies in /dev/shm is seen in the agents' own.
TINY = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'

End = dict[str, Any]


class RankHandle:
    """A rank that runs. `log` is what it printed."""

    def __init__(self, pid: int, log: Path, pipe: Connection) -> None:
        self.pid, self.pipe, self._log = pid, pipe, log
        self.news: dict[str, Any] = {}  # what it told, by name
        self.end: End | None = None
        self.gone = False

    def read(self) -> None:
        """Take what it says; its pipe is readable."""
        try:
            name, value = self.pipe.recv()
        except (EOFError, OSError):
            self.gone = True
            return
        if name == "end":
            self.end, self.gone = value, True
        else:
            self.news[name] = value

    def send(self, word: Any) -> None:
        with suppress(OSError):
            self.pipe.send(word)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")


@dataclass
class RankGroup:
    """Ranks of one group, or of as many as they make."""

    ranks: list[RankHandle]
    port: int  # the store's

    def until(self, news: str, seconds: float = STARTED) -> None:
        """Wait until every rank has told `news`."""
        end = time.monotonic() + seconds
        while missing := [rank for rank in self.ranks if news not in rank.news]:
            if any(rank.gone for rank in missing) or time.monotonic() > end:
                said = [rank.end or rank.log[-2000:] for rank in missing]
                raise RuntimeError(f"no '{news}' from all ranks: {said}")
            self._read(missing, end)

    def ends(self, seconds: float) -> list[End]:
        """Return what each rank said at its end; a rank that does not end in time is killed."""
        end = time.monotonic() + seconds
        while running := [rank for rank in self.ranks if not rank.gone]:
            if time.monotonic() > end:
                break
            self._read(running, end)
        self.close()
        hung, died = f"hangs; killed after {seconds:.0f} s", "its process died"
        return [rank.end or {"lost": died if rank.gone else hung} for rank in self.ranks]

    @staticmethod
    def _read(some: Sequence[RankHandle], end: float) -> None:
        ready = wait([rank.pipe for rank in some], max(0.0, end - time.monotonic()))
        for rank in some:
            if rank.pipe in ready:
                rank.read()

    def close(self) -> None:
        for rank in self.ranks:
            if not rank.gone:
                kill(rank.pid)
            rank.pipe.close()


class Crew:
    """An agent on each of `count` hosts."""

    def __init__(self, count: int) -> None:
        self.hosts = Hosts(count)
        self.hosts.__enter__()
        self.folder = Path(tempfile.mkdtemp(prefix="ringcomm-crew-"))
        self._listener = Listener(str(self.folder / "socket"), "AF_UNIX", backlog=64)
        self._numbers, self._ports = itertools.count(), itertools.count(30_000)
        self.shift = self.folder / "shift"  # seconds that the clocks of all ranks are wrong by
        self.shift.write_bytes(bytes(8))
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        library = self.folder / "shim.so"
        words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(FOLDER / "shim.c")]
        subprocess.run([*words, "-ldl"], check=True)
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "LD_PRELOAD": str(library)}
        env["CLOCK_SHIFT"] = str(self.shift)
        with (self.folder / "agents").open("wb") as log:
            for host in range(self.hosts.count):
                words = ["sh", "-ec", TINY, "sh", sys.executable, "-m", PROGRAM]
                words += [str(self.folder / "socket"), str(host)]
                self.hosts.start(host, words, env, log.fileno(), START)
        self.agents: dict[int, tuple[int, Connection]] = {}
        while len(self.agents) < self.hosts.count:
            pipe = self._accept()
            host, pid = pipe.recv()
            self.agents[host] = pid, pipe

    def _accept(self) -> Connection:
        self._listener._listener._socket.settimeout(STARTED)  # type: ignore[attr-defined]
        try:
            return self._listener.accept()
        except TimeoutError:
            raise RuntimeError((self.folder / "agents").read_text()) from None

    def job(
        self,
        task: str,
        places: Sequence[int],
        backend: str = "ringcomm",
        args: Sequence[Any] = (),
        port: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RankGroup:
        """Start a task of agent.py as every rank; `places` are their hosts.

        The store is rank 0's unless it is served at a `port` of host 0 by somebody else.
        """
        number, serve = next(self._numbers), port is None
        port = port or next(self._ports)
        address = self.hosts.addresses[places[0] if serve else 0]
        tickets: list[tuple[int, Path]] = []
        for rank, host in enumerate(places):
            log = self.folder / f"log{number}.{rank}"
            order: dict[str, object] = {"task": task, "args": list(args), "backend": backend}
            order |= {"rank": rank, "size": len(places), "log": str(log), "ticket": (number, rank)}
            order |= {"address": address, "port": port, "serve": serve and rank == 0}
            order["env"] = {**(env or {})}
            pipe = self.agents[host][1]
            pipe.send(order)
            tickets.append((pipe.recv(), log))
        pipes: dict[int, Connection] = {}
        while len(pipes) < len(places):
            pipe = self._accept()
            try:
                ticket = pipe.recv()
            except EOFError:  # the job was killed at once
                continue
            if ticket[0] == number:
                pipes[ticket[1]] = pipe
        return RankGroup([RankHandle(*ticket, pipes[i]) for i, ticket in enumerate(tickets)], port)

    def close(self) -> None:
        self.hosts.close()
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def crew() -> Crew:
    """The four hosts that all rows share; they go when this process ends."""
    made = Crew(4)
    atexit.register(made.close)
    return made


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal; when it was sent."""
    now = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return now


def await_end(pid: int, seconds: float = 10) -> None:
    """Wait for the end of a process that was killed: its ports are free afterwards."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            assert select.select([process], [], [], seconds)[0], "it has not ended"
        finally:
            os.close(process)
