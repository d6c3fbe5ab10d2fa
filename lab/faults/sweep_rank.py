"""One of two ranks on this host that talk over TCP, rank 0 through a proxy that resets.

    python -m lab.faults.sweep_rank RANK STORE_PORT PORT0 PORT1 WAYS

Rank 1 cannot connect: so every connection goes through the proxy, and WAYS (JSON: for each
connection, after how many bytes up or down it is reset) happens in order. Rank 0 prints how many
operations and connections there were.
"""

from __future__ import annotations

import json
import os
import socket
import sys

import torch
import torch.distributed as dist

import ringcomm  # noqa: F401
from lab.proxy import Proxy, Way

HOST = "127.0.0.1"


class Through(dist.Store):
    """A store that gives other ports than it was told."""

    def __init__(self, store: dist.Store, old: int, new: int) -> None:
        super().__init__()
        self.store, self.old, self.new = store, str(old).encode(), str(new).encode()
        assert len(self.old) == len(self.new), "it shall stay as long as it is"

    def get(self, key: str) -> bytes:
        return self.store.get(key).replace(b":" + self.old, b":" + self.new)

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], *timeout: object) -> None:
        self.store.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)


def deaf() -> tuple[socket.socket, socket.socket]:
    """A listener that answers nobody: its queue is full."""
    listener = socket.create_server((HOST, 0), backlog=0)
    return listener, socket.create_connection(listener.getsockname())


def work(rank: int, enough: object) -> int:
    """Operations of few bytes, so that a connection carries several; every result is checked."""
    number, more = 0, True
    while more:
        for _ in range(4):
            number += 1
            count = 1 + number % 50
            tensor = torch.arange(count) * (rank + 1) + number
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.arange(count) * 3 + 2 * number), number
        flag = torch.tensor([int(rank == 0 and not enough())])  # type: ignore[operator]
        dist.all_reduce(flag)
        more = bool(flag)
    return number


def main() -> None:
    rank, store_port, *ports = map(int, sys.argv[1:5])
    ways = json.loads(sys.argv[5])
    os.environ["RINGCOMM_PORTS"] = str(ports[rank])
    store = dist.TCPStore(HOST, store_port, 2, is_master=rank == 0, wait_for_workers=False)
    if rank == 1:
        listener, _filler = deaf()
        through = Through(store, ports[0], listener.getsockname()[1])
        dist.init_process_group("ringcomm", store=through, rank=rank, world_size=2)
        work(rank, None)
        dist.destroy_process_group()
        return
    up, down = ([Way(reset_after=way) for way in side] for side in zip(*ways, strict=True))
    with Proxy((HOST, ports[1]), up, down) as proxy:
        through = Through(store, ports[1], proxy.address[1])
        dist.init_process_group("ringcomm", store=through, rank=rank, world_size=2)
        number = work(rank, lambda: proxy.connections >= len(ways))
        dist.destroy_process_group()
    print(json.dumps({"operations": number, "connections": proxy.connections}), flush=True)


main()
