"""DistributedDataParallel over ringcomm: every tensor of a training is Gloo's, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lab.pair import STEPS, Pair, State, other_backends
from lab.ranks import Rank


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


BIG = {"bucket_cap_mb": 100}  # one bucket: PowerSGD's hook runs collectives of several at once
# Options of DDP by variant; the functions below give a variant the rest.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "small_buckets": {"bucket_cap_mb": 0.01},
    "no_sync": {},
    "join": {},
    "throw": {},
    "channels_last": {},
    "subgroup": {},
    "sampler": {},
    "ignored": {},
    "no_init_sync": {"init_sync": False},
    # Gradients that are not there
    "unused": {"find_unused_parameters": True},
    "static_unused": {"static_graph": True, "find_unused_parameters": True},
    "skip_unused": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    # Hooks
    "fp16": {},
    "bf16": {},
    "power": BIG,
    # Optimizers and types of their own
    "in_backward": {},
    "fused": {},
    "mixed": {
        "mixed_precision": _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    },
}
SHORT = ("plain", "unused", "no_sync", "join", "fp16", "power", "in_backward", "subgroup", "mixed")


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.rand(8, 1, 8, 8, generator=seeded),
        torch.randint(0, 10, (8,), generator=seeded),
    )


def register_hook(model: DistributedDataParallel, variant: str) -> None:
    if variant == "fp16":
        model.register_comm_hook(None, hooks.fp16_compress_hook)
    elif variant == "bf16":
        # Not by its own name, by which DDP would take it for one that needs CUDA.
        model.register_comm_hook(
            None, lambda state, bucket: hooks.bf16_compress_hook(state, bucket)
        )
    elif variant == "power":
        state = power_sgd.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=4, min_compression_rate=0.5
        )
        model.register_comm_hook(state, power_sgd.powerSGD_hook)


def wrapped(rank: Rank, variant: str) -> DistributedDataParallel:
    """Make the model; DDP broadcasts rank 0's parameters unless the variant says otherwise."""
    torch.manual_seed(0 if variant in ("no_init_sync", "ignored") else rank.index)
    module, options = Net(), dict(VARIANTS[variant])
    if variant == "channels_last":
        module = module.to(memory_format=torch.channels_last)
    elif variant == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, ["body.9.weight", "extra.bias"]
        )
    elif variant == "in_backward":
        settings = {"lr": 0.05, "momentum": 0.9}
        _apply_optimizer_in_backward(torch.optim.SGD, module.extra.parameters(), settings)
    elif variant == "subgroup":
        options["process_group"] = dist.new_group([*rank.others, rank.index], sort_ranks=True)
    model = DistributedDataParallel(module, **options)
    if variant == "fused":
        model._register_fused_optim(torch.optim.SGD, lr=0.05)
    register_hook(model, variant)
    return model


def batches(rank: Rank, variant: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if variant == "sampler":
        images, labels = (
            torch.cat(some) for some in zip(*(batch(0, i) for i in range(4)), strict=True)
        )
        known = TensorDataset(images, labels)
        sampler = DistributedSampler(known, seed=1)
        for epoch in range(STEPS // 4):
            sampler.set_epoch(epoch)
            yield from DataLoader(known, batch_size=4, sampler=sampler)
        return
    uneven = {"join": 1, "throw": 2}.get(variant, 0)
    for step in range(STEPS + uneven * rank.index):
        yield batch(rank.index, step)


def fit(rank: Rank, model: DistributedDataParallel, variant: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (images, labels) in enumerate(batches(rank, variant)):
        if variant == "channels_last":
            images = images.to(memory_format=torch.channels_last)
        extra = "unused" not in variant or (variant == "unused" and step % 2 == 0)
        silent = variant == "no_sync" and step % 3 != 2
        with model.no_sync() if silent else contextlib.nullcontext():
            scores = model(images, extra=extra).float()
            nn.functional.cross_entropy(scores, labels).backward()
        if not silent and variant != "fused":
            optimizer.step()
            optimizer.zero_grad()


def train(rank: Rank, variant: str) -> State:
    """Return all parameters and buffers after training."""
    model, raised = wrapped(rank, variant), ""
    join = {"join": {}, "throw": {"throw_on_early_termination": True}}.get(variant)
    try:
        with contextlib.nullcontext() if join is None else model.join(**join):
            fit(rank, model, variant)
    except RuntimeError as error:
        raised = str(error)
    assert ("exhausted" in raised) == (variant == "throw"), raised
    state = {name: tensor.detach() for name, tensor in model.module.state_dict().items()}
    assert all(tensor.isfinite().all() for tensor in state.values()), "nothing to compare"
    return state


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    pair = Pair(2)
    yield pair
    pair.leave()


@pytest.mark.parametrize("variant", forms(VARIANTS, *SHORT))
def test_all_is_as_over_gloo(two: Pair, variant: str) -> None:
    two.check(train, variant)


def test_gloo_would_be_seen(two: Pair) -> None:
    """Pair.check requires that ringcomm's ranks have made no other backend."""
    assert all(two.gloos(other_backends))


@pytest.mark.slow
def test_three_ranks() -> None:
    """Three summands have several orders, so the last bit may differ from Gloo's."""
    three = Pair(3)
    three.check(train, "plain", rtol=1e-3)
    three.leave()
