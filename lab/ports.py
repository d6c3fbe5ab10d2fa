"""Ports for what tests serve, each worker's from a range of its own.

The range lies below the ports that the kernel gives out, so nobody takes one between its choice and
its use.
"""

from __future__ import annotations

import itertools
import os
import socket

RANGE = 4000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_first = 16000 + RANGE * (_worker % 4)
_offsets = itertools.count(os.getpid() * 37)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens at."""
    while True:
        port = _first + next(_offsets) % RANGE
        try:
            socket.create_server((host, port)).close()
        except OSError:
            continue
        return port
