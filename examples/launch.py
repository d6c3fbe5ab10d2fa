"""Fit a line with DistributedDataParallel, started by whatever launcher there is.

    torchrun --standalone --nproc-per-node 2 examples/launch.py
    python -m torch.distributed.launch --nproc-per-node 2 examples/launch.py

Shows what a script needs for both: `init_process_group` reads what the launcher put into the
environment, and the older launcher also passes `--local-rank`, which the script has to accept.
Exits with 1 when the line is wrong, or not the same on every rank, or a rank was told a wrong
`--local-rank`. Each host has to have the same number of ranks.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # or Gloo's threads outlive destroy_process_group()
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TRUTH = torch.tensor([2.0, -3.0, 0.5, 1.0])  # three slopes and the intercept


def train(steps: int) -> torch.Tensor:
    """Fit the line to this rank's share of the points; return slopes and intercept."""
    torch.manual_seed(0)
    points = torch.randn(256, 3)
    labels = points @ TRUTH[:3] + TRUTH[3]
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(points[mine]).squeeze(1), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return parser.parse_args()


def main() -> int:
    options = parse()
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    line = train(options.steps)
    lines = [torch.empty_like(line) for _ in range(ranks)]
    dist.all_gather(lines, line)
    dist.destroy_process_group()

    error = (line - TRUTH).abs().max().item()
    alike = all(torch.equal(line, other) for other in lines)
    if rank == 0:
        print(f"error={error:.5f} alike={alike} backend={options.backend} ranks={ranks}")
    # A launcher numbers its ranks host by host; here each host has as many as the others.
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if options.local_rank != rank % ranks_per_host:
        print(f"rank {rank} was told that it is local rank {options.local_rank}", file=sys.stderr)
        return 1
    return 0 if error < 1e-3 and alike else 1


if __name__ == "__main__":
    sys.exit(main())
