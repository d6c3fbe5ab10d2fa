"""64 ranks with torch, forked from one that has imported it, each as if on a host of its own."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lab.limits import limit
from lab.ranks import Rank, join, ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RANKS = 64
MIB = 1 << 20


def addresses() -> int:
    """Bytes of addresses that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def meet(rank: Rank) -> int:
    """Make the default group; how many bytes of addresses that and small sums take."""
    os.environ["RINGCOMM_TRANSPORT"] = "tcp"
    import ringcomm  # noqa: F401

    before = addresses()
    join(rank, seconds=limit(100))
    for count in (1, 1000, 100_000):
        data = torch.arange(count, dtype=torch.int64) * (rank.index + 1)
        dist.all_reduce(data)
        sums = torch.arange(count, dtype=torch.int64) * (rank.size * (rank.size + 1) // 2)
        assert torch.equal(data, sums)
    return addresses() - before


def overlap(rank: Rank) -> None:
    """Buckets as DDP has them: several all_reduces at once, and their sums bit for bit."""
    buckets = [torch.full((1 << 16,), float(rank.index + number)) for number in range(8)]
    works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
    for work in works:
        work.wait()
    whole = sum(range(rank.size))
    for number, bucket in enumerate(buckets):
        assert bool((bucket == whole + rank.size * number).all()), number


def train(rank: Rank) -> None:
    """Gradients are whole numbers, of which the mean over 64 ranks is exact."""
    net = nn.Linear(256, 64, bias=False)
    nn.init.zeros_(net.weight)
    model = DistributedDataParallel(net, bucket_cap_mb=1)
    for step in range(3):
        net.zero_grad()
        model(torch.full((1, 256), float(rank.index * step))).sum().backward()
        assert net.weight.grad is not None
        assert bool((net.weight.grad == step * (rank.size - 1) / 2).all()), step


def divide(rank: Rank) -> None:
    """A mesh of three dimensions, and a group of 16."""
    mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("x", "y", "z"))
    for name in ("x", "y", "z"):
        data = torch.tensor([float(rank.index)])
        group = mesh.get_group(name)
        dist.all_reduce(data, group=group)
        assert data.item() == sum(dist.get_process_group_ranks(group))
    some = list(range(3, 51, 3))
    group = dist.new_group(some)
    if rank.index in some:
        data = torch.tensor([float(rank.index)])
        dist.all_reduce(data, group=group)
        assert data.item() == sum(some)
    dist.barrier()


def test_64_ranks_with_torch() -> None:
    with ranks(RANKS, backend=None) as some:
        taken = some(meet, seconds=120)
        for task in (overlap, train, divide):
            some(task, seconds=120)
    print(sorted(each // MIB for each in taken))
    assert max(taken) < 512 * MIB, taken
