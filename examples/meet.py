"""Let two ranks find one another in each of the ways that torch has, one after the other.

    python examples/meet.py
    python examples/meet.py --how file:// --how TCPStore

Shows the arguments that each way needs. A HashStore lives in one process, so the group that it
makes has one rank. Every group adds up its ranks; a wrong sum raises.
"""

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

HOST = "127.0.0.1"


@dataclass
class Place:
    """A rank of the group, and a free port or file where ranks can meet."""

    rank: int
    ranks: int
    port: int
    file: str

    @property
    def who(self) -> dict[str, int]:
        return {"rank": self.rank, "world_size": self.ranks}


def by_environment(place: Place) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(place.port))
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.ranks))
    return {"init_method": "env://"}  # also what is done when nothing is said


def by_address(place: Place) -> dict[str, Any]:
    return {"init_method": f"tcp://{HOST}:{place.port}", **place.who}


def by_file(place: Place) -> dict[str, Any]:
    return {"init_method": f"file://{place.file}", **place.who}


def by_tcp_store(place: Place) -> dict[str, Any]:
    store = dist.TCPStore(HOST, place.port, place.ranks, is_master=place.rank == 0)
    return {"store": store, **place.who}


def by_file_store(place: Place) -> dict[str, Any]:
    return {"store": dist.FileStore(place.file, place.ranks), **place.who}


def by_hash_store(_: Place) -> dict[str, Any]:
    return {"store": dist.HashStore(), "rank": 0, "world_size": 1}


WAYS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "env://": by_environment,
    "tcp://": by_address,
    "file://": by_file,
    "TCPStore": by_tcp_store,
    "FileStore": by_file_store,
    "HashStore": by_hash_store,
}


def worker(rank: int, places: dict[str, tuple[int, str]], options: argparse.Namespace) -> None:
    for how, (port, file) in places.items():
        arguments = WAYS[how](Place(rank, options.ranks, port, file))
        dist.init_process_group(options.backend, timeout=timedelta(seconds=30), **arguments)
        total = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(total)
        ranks = 1 if how == "HashStore" else options.ranks
        if (dist.get_world_size(), total.item()) != (ranks, ranks * (ranks + 1) // 2):
            raise ArithmeticError(f"{how}: {dist.get_world_size()} ranks make {total.item()}")
        dist.barrier()  # rank 0 may be the one who keeps the store
        dist.destroy_process_group()


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind((HOST, 0))
    ports: list[int] = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--how", choices=WAYS, action="append", help="only this; may be repeated")
    options = parser.parse_args()
    ways = options.how or list(WAYS)
    with tempfile.TemporaryDirectory() as folder:
        ports = free_ports(len(ways))
        places = {how: (ports[i], f"{folder}/{i}") for i, how in enumerate(ways)}
        spawn(worker, args=(places, options), nprocs=options.ranks)
    print(f"met by {' '.join(places)} backend={options.backend} ranks={options.ranks}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
