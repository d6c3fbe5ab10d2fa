"""A rank of an MPI library: `mpi_rank.py BYTES ROW SECONDS [FOLDER…]`.

It sums float32 in place, ROW times a call, for about so many seconds. Rank 0 prints the seconds of
each call. The folders are cgroups to join, by rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy
from mpi4py import MPI

FEWEST, MOST = 5, 20_000  # calls, as in peers.py


def main() -> None:
    size, row, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    folders = sys.argv[4:]
    world = MPI.COMM_WORLD
    if folders:
        Path(folders[world.rank], "cgroup.procs").write_text(str(os.getpid()))
    data: numpy.ndarray = numpy.ones(size // 4, numpy.float32)
    world.Allreduce(MPI.IN_PLACE, data)
    assert (data == world.size).all(), data
    data[:] = 0
    calls, times = FEWEST, list[float]()
    while calls < MOST and sum(times) < seconds / 2:
        calls = min(MOST, 4 * calls)
        every = world.allgather(sample(world, data, row, calls))
        times = [max(call) for call in zip(*every, strict=True)]
    if world.rank == 0:
        print(json.dumps(times))


def sample(world: MPI.Comm, data: numpy.ndarray, row: int, calls: int) -> list[float]:
    world.Barrier()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        for _ in range(row):
            world.Allreduce(MPI.IN_PLACE, data)
        times.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
