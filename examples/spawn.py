"""Fit a line with DistributedDataParallel on ranks that this script starts itself.

    python examples/spawn.py --ranks 2

Shows `torch.multiprocessing.spawn`: no launcher; the parent picks a free port and tells it to its
ranks, and an exception on a rank ends the others and is raised in the parent.
"""

import argparse
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # or Gloo's threads outlive destroy_process_group()
from torch import nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

TRUTH = torch.tensor([2.0, -3.0, 0.5, 1.0])  # three slopes and the intercept


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def worker(rank: int, ranks: int, port: int, options: argparse.Namespace) -> None:
    """Run one rank; `spawn` gives it its number."""
    dist.init_process_group(
        options.backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    points = torch.randn(256, 3)
    labels = points @ TRUTH[:3] + TRUTH[3]
    mine = slice(rank, None, ranks)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(options.steps):
        loss = nn.functional.mse_loss(model(points[mine]).squeeze(1), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    line = nn.utils.parameters_to_vector(model.parameters()).detach()
    lines = [torch.empty_like(line) for _ in range(ranks)]
    dist.all_gather(lines, line)
    dist.destroy_process_group()
    error = (line - TRUTH).abs().max().item()
    if error >= 1e-3 or not all(torch.equal(line, other) for other in lines):
        raise ArithmeticError(f"rank {rank}: the line is {line}, it should be {TRUTH}")
    if rank == 0:
        print(f"error={error:.5f} backend={options.backend} ranks={ranks}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    spawn(worker, args=(options.ranks, free_port(), options), nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
