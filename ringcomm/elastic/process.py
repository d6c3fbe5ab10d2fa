"""A process as those of its world know it."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from ringcomm._flight import processes


@dataclass(frozen=True)
class Process:
    """One process: a member of a world, or one that wants to be."""

    uuid: str
    host: str
    pid: int
    boot: str = ""  # the start of the host's kernel
    machine: str = ""  # the host's own name of itself
    space: str = ""  # the namespace of process ids
    started: str = ""  # in the kernel's ticks
    card: str = ""  # by which the engine knows it
    rank: int = -1  # that its launcher gave it
    unit: str = ""  # the name of its unit, if the world has units: see units.py
    place: int = -1  # in a unit; -1: it has none yet
    ready: bool = True  # to be a guest: its program has called track
    trip: float = 0.0  # seconds that the store took to answer it

    @classmethod
    def this(cls, card: str) -> Process:
        """Describe this process, under a name that no process had before."""
        rank, known = os.environ.get("RANK", ""), processes.this_process()
        return cls(
            uuid.uuid4().hex,
            socket.gethostname(),
            known.pid,
            known.boot,
            _machine(),
            known.numbers,
            known.started,
            card,
            int(rank) if rank.isdigit() else -1,
        )

    @property
    def shard(self) -> int:
        """The number of the shard that it holds: its place, or 0 in a world without units."""
        return max(0, self.place)

    def is_dead(self) -> bool:
        """Tell whether it is certain, from here, that the process has ended."""
        if socket.gethostname() != self.host or not self.boot:
            return False
        if processes.here()[0] != self.boot:  # another host of that name, or this one, started anew
            return bool(self.machine) and _machine() == self.machine
        known = processes.Process(self.pid, self.boot, self.space, self.started)
        return processes.life_of(known) is processes.Life.GONE


def _machine() -> str:
    """Return the host's own name of itself, which a restart does not change; "": it has none."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""
