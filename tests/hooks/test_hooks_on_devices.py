"""Tensors of CUDA, on the simulated device: the same bits as those of the CPU.

There torch's kernels wait for the current stream and the host computes them, so a wait that is
missing between two of them is not found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from lab.oracle import bits
from lab.outcomes import Outcome, in_child, rank_of
from lab.ranks import Rank, Ranks, join, ranks
from lab.simulated_device import CUDA, pretend
from ringcomm.compression import exchange, hooks

HOWS: list[dict[str, Any]] = [
    {},
    {"format": "fp8"},
    {"format": "bf16"},
    {"seed": 7},
    {"format": "fp8", "seed": 7},
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2, backend=None) as some:
        yield some


class OneStream:
    """The simulated device's current stream, in the place of another one."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass


def all_ranks(hosts: list[str], rank: int, *, flat: bool) -> tuple[list[int], list[int]]:
    """As if each rank were on a host of its own."""
    del flat
    return list(range(len(hosts))), [rank]


def on_cuda(rank: Rank, life: str, way: str) -> Outcome:
    def body() -> Outcome:
        os.environ.update(CUDA)
        join(rank_of(rank, life), "cpu:ringcomm,cuda:ringcomm", seconds=20)
        cuda = pretend()
        torch.cuda.Stream = OneStream
        torch.Tensor.record_stream = lambda self, stream: None
        exchange._places = all_ranks
        return {"call": call, "train": train}[way](rank, cuda)

    return in_child(body)


def call(rank: Rank, cuda: Any) -> Outcome:
    seeded = torch.Generator().manual_seed(rank.index)
    source, results = torch.randn(3000, generator=seeded), []
    for how in HOWS:
        here, there = source.clone(), source.clone().to("cuda")
        ringcomm.compression.quantized_all_reduce(here, **how)
        ringcomm.compression.quantized_all_reduce(there, **how)
        cuda.synchronize()
        results.append([bits(here), bits(there.cpu())])
    return {"answer": results}


def train(rank: Rank, cuda: Any) -> Outcome:
    """A step or two by DDP, on either side."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(40, 40).to(device))
        state = hooks.register(model, "int8", flat=True)
        for step in range(3):
            data = torch.full((2, 40), 0.1 * (1 + step + rank.index)).to(device)
            model(data).square().sum().backward()
        cuda.synchronize()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([bits(gradient.cpu()) for gradient in gradients if gradient is not None])
        state.close()
    return {"answer": results}


def test_calls_on_a_device(two: Ranks) -> None:
    answers = two(on_cuda, "call", "call")
    assert answers[0] == answers[1]
    for here, there in answers[0]["answer"]:
        assert here == there


def test_ddp_on_a_device(two: Ranks) -> None:
    answers = two(on_cuda, "train", "train")
    assert answers[0] == answers[1]
    here, there = answers[0]["answer"]
    assert here == there
    assert len(here) == 2
