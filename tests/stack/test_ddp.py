"""DistributedDataParallel over ringcomm: at 2 ranks its parameters are Gloo's, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import forms
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lab.oracle import bits
from lab.pair import STEPS, other_backends
from lab.ranks import Rank, Ranks


class Net(nn.Module):
    """A small CNN with what matters to DDP: buffers, many parameters, one that may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        self.extra = nn.Linear(10, 10)

    def forward(self, images: torch.Tensor, *, extra: bool = True) -> torch.Tensor:
        scores: torch.Tensor = self.body(images)
        return self.extra(scores) if extra else scores


# What is given to DDP, and how a step is made.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "small_buckets": {"bucket_cap_mb": 0.01},
    "unused": {"find_unused_parameters": True},
    "no_sync": {},
    "join": {},
    "hook": {},
    "channels_last": {},
}


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.rand(8, 1, 8, 8, generator=seeded),
        torch.randint(0, 10, (8,), generator=seeded),
    )


def train(rank: Rank, variant: str) -> tuple[list[str], list[Any]]:
    """Return the digests and values of all parameters and buffers after training."""
    torch.manual_seed(rank.index)  # DDP broadcasts rank 0's
    module = Net()
    if variant == "channels_last":
        module = module.to(memory_format=torch.channels_last)
    model = DistributedDataParallel(module, **VARIANTS[variant])
    if variant == "hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = STEPS + rank.index if variant == "join" else STEPS
    with model.join() if variant == "join" else contextlib.nullcontext():
        for step in range(steps):
            images, labels = batch(rank.index, step)
            if variant == "channels_last":
                images = images.to(memory_format=torch.channels_last)
            extra = variant != "unused" or step % 2 == 0
            silent = variant == "no_sync" and step % 3 != 2
            with model.no_sync() if silent else contextlib.nullcontext():
                nn.functional.cross_entropy(model(images, extra=extra), labels).backward()
            if not silent:
                optimizer.step()
                optimizer.zero_grad()
    state = [tensor.detach() for tensor in model.module.state_dict().values()]
    dist.barrier()
    return [bits(tensor) for tensor in state], [tensor.numpy() for tensor in state]


@pytest.fixture(scope="module")
def ours() -> Iterator[Ranks]:
    some = Ranks(2)
    yield some
    some.leave()


@pytest.fixture(scope="module")
def gloos() -> Iterator[Ranks]:
    some = Ranks(2, "gloo")
    yield some
    some.kill()  # Gloo's threads may still hold tensors: it is not asked to leave


@pytest.mark.parametrize("variant", forms(VARIANTS, "plain", "unused", "no_sync", "join"))
def test_parameters_are_those_of_gloo(ours: Ranks, gloos: Ranks, variant: str) -> None:
    names = list(Net().state_dict())
    here, there = ours(train, variant), gloos(train, variant)
    parameters = [i for i, name in enumerate(names) if "running" not in name and "num_" not in name]
    for rank in range(2):
        for i in parameters:
            assert here[rank][0][i] == there[rank][0][i], f"rank {rank}: {names[i]} differs"
            assert here[rank][0][i] == here[0][0][i], f"{names[i]} differs between ranks"


def test_no_other_backend_was_made(ours: Ranks, gloos: Ranks) -> None:
    ours(train, "plain")
    gloos(train, "plain")
    assert ours(other_backends) == [[], []]
    assert all(gloos(other_backends)), "this test would not see it"


@pytest.mark.slow
def test_three_ranks() -> None:
    """Three summands have several orders: the last bit may differ from Gloo's, not between us."""
    ours, gloos = Ranks(3), Ranks(3, "gloo")
    try:
        here, there = ours(train, "plain"), gloos(train, "plain")
        ours.leave()
    finally:
        ours.kill()
        gloos.kill()
    names = list(Net().state_dict())
    for rank in range(3):
        for i, name in enumerate(names):
            if "running" in name or "num_" in name:
                continue
            assert here[rank][0][i] == here[0][0][i], f"{name} differs between ranks"
            np.testing.assert_allclose(here[rank][1][i], there[rank][1][i], 1e-3, 1e-5)


def accumulate(rank: Rank) -> None:
    """DDP of n ranks is n times as large a batch on one."""
    torch.manual_seed(0)
    single, module = nn.Linear(64, 10), nn.Linear(64, 10)
    module.load_state_dict(single.state_dict())
    model = DistributedDataParallel(module)
    for step in range(STEPS):
        for net, shards in ((model, [rank.index]), (single, list(range(rank.size)))):
            for shard in shards:
                images, labels = batch(shard, step)
                loss = nn.functional.cross_entropy(net(images.flatten(1)), labels)
                (loss / len(shards)).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    for mine, reference in zip(module.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)


def test_equals_gradient_accumulation(ours: Ranks) -> None:
    ours(accumulate)
