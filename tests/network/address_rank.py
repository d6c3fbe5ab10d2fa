"""A host of test_addresses.py: becomes a rank each time it is told to.

    address_rank.py SOCKET

Takes one line of JSON over a Unix socket: the rank, where the store is, and variables of its
environment. Answers with another: the rank's result, and where it listened. Each is a fork
of this process, which has imported torch once and has no library of ringcomm's yet. It ends, and
with rank 0 the store, when the socket does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcomm  # noqa: F401

COUNT = 1 << 20  # elements of 4 bytes


def listening() -> list[str]:
    """Where this process listens: hexadecimal addresses and ports, as the kernel writes them."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(descriptor.readlink()))
        except OSError:  # the listing's own
            continue
    sockets = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                sockets.append(words[1])
    return sockets


def be_rank(store: dist.Store, rank: int, size: int) -> dict[str, Any]:
    began, error = time.monotonic(), ""
    listened: list[str] = []
    try:
        dist.init_process_group("ringcomm", store=store, rank=rank, world_size=size)
        listened = listening()
        tensor = torch.full((COUNT,), rank + 1.0)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((COUNT,), size * (size + 1) / 2))
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as told:
        error = str(told)
    return {
        "error": error,
        "seconds": time.monotonic() - began,
        "listened": listened,
        "named": socket.gethostbyname(socket.gethostname()),
    }


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        while True:
            connection, _ = listener.accept()
            if os.fork() != 0:
                connection.close()
                continue
            with connection.makefile("rw") as stream:
                told = json.loads(stream.readline())
                os.environ.update(told["environment"])
                place = told["host"], told["port"], 2, told["rank"] == 0
                store = dist.TCPStore(*place)
                answer = be_rank(store, told["rank"], 2)
                print(json.dumps(answer), file=stream, flush=True)
                stream.read()  # until the others need the store no more
            os._exit(0)


main()
