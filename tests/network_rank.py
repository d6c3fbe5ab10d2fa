"""A rank of tests/test_network.py: exact collectives for some seconds, and what went wrong.

    network_rank.py KIND SECONDS

Prints one line of JSON: operations, the longest of them in seconds, and the error with the time it
took to be told.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ringcomm  # noqa: F401

KIND, SECONDS = sys.argv[1], float(sys.argv[2])


def all_reduces(rank: int, size: int, number: int, counts: torch.Generator) -> None:
    """One all_reduce of int64 of a random size; every element is checked."""
    magnitude = int(torch.randint(0, 20, (1,), generator=counts))
    count = 1 + int(torch.randint(0, 1 << magnitude, (1,), generator=counts))
    places = torch.arange(count)
    tensor = places * (rank + 1) + number
    dist.all_reduce(tensor)
    assert torch.equal(tensor, places * (size * (size + 1) // 2) + size * number), (number, count)


def everything(rank: int, size: int, number: int, counts: torch.Generator) -> None:
    """Every collective once, of a size that depends on the round."""
    all_reduces(rank, size, number, counts)
    count = (1, 28, 1000, 70_000, 300_001)[number % 5]
    mine = torch.arange(count) + 1000 * rank
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine)
    for peer, part in enumerate(gathered):
        assert torch.equal(part, torch.arange(count) + 1000 * peer)
    root = number % size
    tensor = mine.clone()
    dist.broadcast(tensor, root)
    assert torch.equal(tensor, gathered[root])
    tensor = mine.clone()
    dist.reduce(tensor, root)
    if rank == root:
        assert torch.equal(tensor, sum(gathered, torch.zeros_like(mine)))
    part = torch.empty_like(mine)
    dist.reduce_scatter(part, [mine + peer for peer in range(size)])
    assert torch.equal(part, sum(gathered, torch.zeros_like(mine)) + size * rank)
    dist.scatter(part, gathered if rank == root else None, root)
    assert torch.equal(part, mine)
    dist.gather(mine, gathered if rank == root else None, root)
    received = [torch.empty_like(mine) for _ in range(size)]
    dist.all_to_all(received, [mine + peer for peer in range(size)])
    for peer, part in enumerate(received):
        assert torch.equal(part, torch.arange(count) + 1000 * peer + rank)
    request = dist.isend(mine, (rank + 1) % size, tag=number)
    dist.recv(part, (rank - 1) % size, tag=number)
    assert request is not None
    request.wait()
    assert torch.equal(part, torch.arange(count) + 1000 * ((rank - 1) % size))
    dist.barrier()


def mismatch(rank: int, size: int, number: int, counts: torch.Generator) -> None:
    """From the tenth on, the last rank sums up another number of elements."""
    dist.all_reduce(torch.ones(1000 + (rank == size - 1 and number >= 10)))


def main() -> None:
    began = time.monotonic()
    dist.init_process_group("ringcomm")
    rank, size = dist.get_rank(), dist.get_world_size()
    joined = time.monotonic() - began
    counts = torch.Generator().manual_seed(7)
    step = {"all_reduces": all_reduces, "everything": everything, "mismatch": mismatch}[KIND]
    stop, number, longest, error, took = torch.zeros(1), 0, 0.0, "", 0.0
    began = time.monotonic()
    try:
        while stop[0] == 0:
            before = time.monotonic()
            step(rank, size, number, counts)
            took = time.monotonic() - before
            longest = max(longest, took)
            number += 1
            if number % 8 == 0:
                stop[0] = float(rank == 0 and time.monotonic() - began > SECONDS)
                dist.all_reduce(stop)
    except RuntimeError as told:
        error, took = str(told), time.monotonic() - before
    before = time.monotonic()
    dist.destroy_process_group()
    print(
        json.dumps(
            {
                "rank": rank,
                "operations": number,
                "longest": longest,
                "error": error,
                "took": took,
                "told_at": time.time(),
                "joined": joined,
                "destroyed": time.monotonic() - before,
                "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                "memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
        ),
        flush=True,
    )


main()
