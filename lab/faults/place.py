"""For the tasks of agent.py: where they run, exact work, and how it ended."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

End = dict[str, Any]


class Place:
    """Where a task runs: its first argument."""

    def __init__(self, order: dict[str, Any], pipe: Connection) -> None:
        self.rank, self.size, self.backend = order["rank"], order["size"], order["backend"]
        self.pipe = pipe
        self._address, self._port, self._serve = order["address"], order["port"], order["serve"]
        self._store: dist.Store | None = None

    def store(self) -> dist.Store:
        if self._store is None:
            wait = timedelta(seconds=60)
            self._store = dist.TCPStore(
                self._address, self._port, None, self._serve, wait, wait_for_workers=False
            )
        return self._store

    def join(self, life: object = "", seconds: float = 60) -> None:
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(str(life), self.store()),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=seconds),
        )

    def tell(self, name: str, value: object = None) -> None:
        self.pipe.send((name, value))


def end_of(call: Callable[[], object]) -> End:
    """How a call failed, when, and how long destroying the group took."""
    began, kind, text = time.monotonic(), "", ""
    try:
        call()
    except Exception as error:  # noqa: BLE001  the row says what it may be
        kind, text = type(error).__name__, str(error)
    failed = time.monotonic()
    end = {"kind": kind, "text": text, "at": failed, "seconds": failed - began}
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    return {**end, "destroyed": time.monotonic() - failed}


def mixed(place: Place, number: int, counts: torch.Generator) -> None:
    """A collective or a message of a random size; every element is checked."""
    rank, size = place.rank, place.size
    magnitude = int(torch.randint(0, 19, (1,), generator=counts))
    count = 1 + int(torch.randint(0, 1 << magnitude, (1,), generator=counts))
    mine = torch.arange(count) * (rank + 1) + number
    total = torch.arange(count) * (size * (size + 1) // 2) + size * number
    kind = number % 6
    if kind == 0:
        dist.all_reduce(mine)
        assert torch.equal(mine, total), number
    elif kind == 1:
        root = number % size
        dist.broadcast(mine, root)
        assert torch.equal(mine, torch.arange(count) * (root + 1) + number), number
    elif kind == 2:
        works = [dist.all_reduce(part, async_op=True) for part in (mine, mine[:1].clone())]
        for work in works:
            assert work is not None
            work.wait()
        assert torch.equal(mine, total), number
    elif kind == 3:
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine)
        for peer, part in enumerate(parts):
            assert torch.equal(part, torch.arange(count) * (peer + 1) + number), number
    elif kind == 4:
        request = dist.isend(mine, (rank + 1) % size, tag=number)
        part, left = torch.empty_like(mine), (rank - 1) % size
        dist.recv(part, left, tag=number)
        assert request is not None
        request.wait()
        assert torch.equal(part, torch.arange(count) * (left + 1) + number), number
    else:
        dist.barrier()


def used() -> End:
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "wall": time.time(),
        "shm_bytes": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    }
