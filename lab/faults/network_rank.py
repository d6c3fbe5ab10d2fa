"""A rank of the tests on several hosts: exact collectives, and what went wrong.

    network_rank.py KIND SECONDS

Runs for SECONDS, if that is not 0, or until a file `stop` is in FAULT_FOLDER: `ready-RANK` says
there that the rank has begun, `ended-RANK` that it is through. BACKEND chooses another backend,
TIMEOUT gives the group one. Prints one line of JSON: operations, the longest of them in seconds,
and the error with the time it took to be told.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

KIND, SECONDS = sys.argv[1], float(sys.argv[2])
BACKEND = os.environ.get("BACKEND", "ringcomm")
FOLDER = Path(os.environ["FAULT_FOLDER"]) if "FAULT_FOLDER" in os.environ else None
ENOUGH = int(os.environ.get("OPERATIONS", "0"))  # not before; then a file `enough-0` is there
LARGEST = 16 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
calls: list[tuple[float, float, str, int]] = []  # begin, end, which sort, bytes


def all_reduces(rank: int, size: int, number: int, counts: torch.Generator) -> None:
    """One all_reduce of int64 of a random size; every element is checked."""
    magnitude = int(torch.randint(0, 20, (1,), generator=counts))
    count = 1 + int(torch.randint(0, 1 << magnitude, (1,), generator=counts))
    places = torch.arange(count)
    tensor = places * (rank + 1) + number
    dist.all_reduce(tensor)
    assert torch.equal(tensor, places * (size * (size + 1) // 2) + size * number), (number, count)


@functools.cache
def small_numbers(dtype: torch.dtype, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a rank gives, and the sum: exact in any order, in bfloat16 too."""
    count = LARGEST // dtype.itemsize + 1000
    base = torch.randint(0, 240 // size, (count,), generator=torch.Generator().manual_seed(1))
    return (base + rank).to(dtype), (base * size + size * (size - 1) // 2).to(dtype)


def mixed(rank: int, size: int, number: int, counts: torch.Generator) -> None:
    """One all_reduce of 1 KiB to 16 MiB of one of three types; every element is checked."""
    nbytes = 1024 << int(torch.randint(0, 15, (1,), generator=counts))
    dtype = DTYPES[number % len(DTYPES)]
    give, wanted = small_numbers(dtype, rank, size)
    at = int(torch.randint(0, 1000, (1,), generator=counts))
    place = slice(at, at + nbytes // dtype.itemsize)
    tensor = give[place].clone()
    began = time.monotonic()
    dist.all_reduce(tensor)
    calls.append((began, time.monotonic(), f"{dtype} {nbytes}", nbytes))
    assert torch.equal(tensor, wanted[place]), (number, nbytes)


def large(rank: int, size: int, number: int, counts: torch.Generator) -> None:
    """One all_reduce of 16 MiB."""
    tensor = torch.full((LARGEST // 4,), float(rank + number % 1000))
    dist.all_reduce(tensor)
    assert bool((tensor == size * (size - 1) // 2 + size * (number % 1000)).all())


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


def idle(rank: int, size: int, number: int, counts: torch.Generator) -> None:
    """Some operations, silence until a file `wake` is there, and some more."""
    if number == 20 and FOLDER:
        (FOLDER / f"idle-{rank}").touch()
        while not (FOLDER / "wake").exists():
            time.sleep(0.005)
    began = time.monotonic()
    all_reduces(rank, size, number, counts)
    calls.append((began, time.monotonic(), "idle", 0))


KINDS = {
    "all_reduces": all_reduces,
    "mixed": mixed,
    "large": large,
    "everything": everything,
    "idle": idle,
}


def join() -> float:
    """Join when every rank is there, its imports done; how long that took, in seconds."""
    if BACKEND == "ringcomm":
        import ringcomm  # noqa: F401
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    patience = datetime.timedelta(seconds=600)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, size, rank == 0, patience)  # waits for all of them
    timeout = os.environ.get("TIMEOUT")
    given = {"timeout": datetime.timedelta(seconds=float(timeout))} if timeout else {}
    began = time.monotonic()
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, **given)
    return time.monotonic() - began


def shall_stop(number: int, seconds: float) -> bool:
    if FOLDER and (FOLDER / "stop").exists():
        return True
    return 0 < SECONDS < seconds and number >= ENOUGH


def main() -> None:
    joined = join()
    rank, size = dist.get_rank(), dist.get_world_size()
    if KIND == "mixed":
        for dtype in DTYPES:
            small_numbers(dtype, rank, size)
    counts = torch.Generator().manual_seed(int(os.environ.get("SEED", "7")))
    stop, number, longest, error, wrong, took = torch.zeros(1), 0, 0.0, "", False, 0.0
    began = time.monotonic()
    try:
        while stop[0] == 0:
            before = time.monotonic()
            KINDS[KIND](rank, size, number, counts)
            took = time.monotonic() - before
            longest = max(longest, took)
            number += 1
            if number % 8 == 0:
                stop[0] = float(rank == 0 and shall_stop(number, time.monotonic() - began))
                dist.all_reduce(stop)
                if FOLDER and number == 8:
                    (FOLDER / f"ready-{rank}").touch()
                if FOLDER and number >= ENOUGH and rank == 0:
                    (FOLDER / f"enough-{rank}").touch()
    except (RuntimeError, AssertionError) as told:
        error, wrong = str(told), isinstance(told, AssertionError)
        took = time.monotonic() - before
    told_at, told_mono = time.time(), time.monotonic()
    if FOLDER:
        (FOLDER / f"ended-{rank}").touch()
    before = time.monotonic()
    dist.destroy_process_group()
    print(
        json.dumps(
            {
                "rank": rank,
                "operations": number,
                "longest": longest,
                "error": error,
                "wrong": wrong,
                "took": took,
                "told_at": told_at,
                "told": told_mono,
                "joined": joined,
                "destroyed": time.monotonic() - before,
                "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                "memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "calls": calls if rank == 0 else [],
            }
        ),
        flush=True,
    )


main()
