"""Run an algorithm by hand in a group of processes: the last step of by_hand.ipynb.

    from run import run
    run(swing, ranks=4)

Ranks are processes of their own. So the function must be in a file that they can import.
"""

from __future__ import annotations

import socket
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist

import ringcomm
from ringcomm.algorithms import Algorithm


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def all_reduce(rank: int, ranks: int, port: int, algorithm: Algorithm, elements: int) -> float:
    """Run one rank: give rank + 1 everywhere, and return what the sum is everywhere."""
    ringcomm.algorithms.register_algorithm("by_hand", algorithm, ["all_reduce"])
    dist.init_process_group(
        "ringcomm",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        pg_options=ringcomm.Options(algorithm="by_hand"),
    )
    data = torch.full((elements,), float(rank + 1))
    dist.all_reduce(data)
    dist.barrier()  # the store, which is rank 0's, goes with the group
    dist.destroy_process_group()
    if data.min() != data.max():
        raise ArithmeticError(f"rank {rank}: the sums differ, {data.min()} to {data.max()}")
    return data[0].item()


def run(algorithm: Algorithm, ranks: int = 4, elements: int = 100_000) -> list[float]:
    """Return what each rank gets, where rank r gives r + 1. Raises what a rank raises."""
    context = get_context("forkserver")  # it imports torch once, and no thread is copied
    context.set_forkserver_preload(["torch.distributed", "ringcomm"])
    port = free_port()
    with ProcessPoolExecutor(ranks, context) as pool:
        jobs = [
            pool.submit(all_reduce, rank, ranks, port, algorithm, elements) for rank in range(ranks)
        ]
        return [job.result() for job in jobs]
