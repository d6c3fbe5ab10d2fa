"""Tensor and pipeline parallelism over ringcomm: the results are Gloo's.

Each program also compares itself with one process that does the whole work, so that the two
backends cannot be wrong alike.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import forms
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp

from lab.pair import STEPS, Pair, State
from lab.ranks import Rank


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    pair = Pair(2)
    yield pair
    pair.leave()


@pytest.fixture(scope="module")
def four() -> Iterator[Pair]:
    pair = Pair(4)
    yield pair
    pair.leave()


def mesh_of(rank: Rank, *sizes: int) -> DeviceMesh:
    """Return the mesh of these sizes; it is made once, as its groups are."""
    name = f"mesh {sizes}"
    if name not in rank.kept:
        rank.kept[name] = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y")[: len(sizes)])
    return rank.kept[name]


def checked(module: nn.Module, reference: nn.Module) -> State:
    """Return the complete parameters; raise AssertionError if they are not the reference's."""
    state = {name: p.detach() for name, p in module.named_parameters()}
    state = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in state.items()}
    expected = {name: p.detach() for name, p in reference.named_parameters()}
    # One process adds in another order.
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-6)
    return state


# --- tensor parallelism ---

WORDS, WIDTH = 24, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(*parts)  # for the heads that are here
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's layer between an embedding and its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        x = x + self.attention(self.first(x))
        x = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return self.scores(x)


def plan_of(variant: str) -> dict[str, Any]:
    """Return how each part is cut; all but "plain" also cut what lies between the parts."""
    columns, rows, uncut = tp.ColwiseParallel, tp.RowwiseParallel, Replicate()
    along = uncut if variant == "plain" else Shard(1)
    plan: dict[str, Any] = {f"attention.{name}": columns() for name in "qkv"}
    if along != uncut:
        plan |= {"first": tp.SequenceParallel(), "second": tp.SequenceParallel()}
    return plan | {
        "words": rows(input_layouts=uncut, output_layouts=along),
        "attention": tp.PrepareModuleInput(input_layouts=along, desired_input_layouts=uncut),
        "attention.out": rows(output_layouts=along),
        "up": columns(input_layouts=along),
        "down": rows(output_layouts=along),
        "scores": columns(
            input_layouts=along,
            output_layouts=Shard(-1) if variant == "loss" else uncut,
            use_local_output=variant != "loss",
        ),
    }


def sentences(shard: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(1000 * step + shard)
    words = torch.randint(0, WORDS, (4, 7), generator=seeded)
    return words[:, :-1], words[:, 1:].flatten()


def fit(model: nn.Module, shards: list[int], variant: str = "") -> nn.Module:
    context = tp.loss_parallel if variant == "loss" else contextlib.nullcontext
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        batches = [sentences(shard, step) for shard in shards]
        words, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        with context():
            nn.functional.cross_entropy(model(words).flatten(0, 1), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def tensor_parallel(rank: Rank, variant: str) -> State:
    """Cut each layer between two ranks; two such pairs share the batch, and cut once more."""
    torch.manual_seed(0)
    block = Block()
    pairs = rank.size // 2
    reference = fit(copy.deepcopy(block), list(range(pairs)))
    mesh = mesh_of(rank, pairs, 2)
    model = tp.parallelize_module(block, mesh["y"], plan_of(variant))
    if pairs > 1:
        for part in (model.attention, model.up, model):
            fully_shard(part, mesh=mesh["x"])
    return checked(fit(model, [rank.index // 2], variant), reference)


@pytest.mark.parametrize("variant", forms(["plain", "sequence", "loss"], "loss"))
def test_tensor_parallel(two: Pair, variant: str) -> None:
    two.check(tensor_parallel, variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "loss"])
def test_tensor_and_data_parallel(four: Pair, variant: str) -> None:
    """Every sum has two summands: it is Gloo's, bit for bit."""
    four.check(tensor_parallel, variant)


# --- pipelines ---

SINGLE = ["ScheduleGPipe", "Schedule1F1B"]  # a layer a rank; the others have two
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS"]
FOLDED = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]  # the first rank has the last layer too
WIDTHS = [8, 12, 5, 16]  # between the layers: messages differ in size


def layer(index: int) -> nn.Sequential:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTHS[index % 4], WIDTHS[(index + 1) % 4]), nn.Tanh())


def layers_of(rank: Rank, name: str) -> tuple[list[int], int]:
    """Return which layers the rank has, and how many there are."""
    if name in SINGLE:
        return [rank.index], rank.size
    last = 2 * rank.size - 1
    second = last - rank.index if name in FOLDED else rank.index + rank.size
    return [rank.index, second], last + 1


def pipeline(rank: Rank, name: str) -> State:
    mine, size = layers_of(rank, name)
    stages = [PipelineStage(layer(i), i, size, torch.device("cpu")) for i in mine]
    loss, cut = nn.functional.mse_loss, stages[0] if name in SINGLE else stages
    schedule = getattr(schedules, name)(cut, n_microbatches=8, loss_fn=loss)
    reference = nn.Sequential(*(layer(i) for i in range(size)))
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (parameters, reference.parameters())]
    for step in range(STEPS):
        seeded = torch.Generator().manual_seed(step)
        inputs = torch.rand(16, 8, generator=seeded)
        targets = torch.rand(16, WIDTHS[size % 4], generator=seeded)
        given = [inputs] if 0 in mine else []
        schedule.step(*given, target=targets if size - 1 in mine else None)
        loss(reference(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state: State = {}
    for index, stage in zip(mine, stages, strict=True):
        part = checked(stage.submod, reference[index])
        state |= {f"{index}.{name}": tensor for name, tensor in part.items()}
    return state


@pytest.mark.parametrize("name", forms([*SINGLE, *LOOPED, *FOLDED], SINGLE[1], FOLDED[0]))
def test_pipeline(two: Pair, name: str) -> None:
    two.check(pipeline, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [LOOPED[0], FOLDED[0]])
def test_pipeline_at_four(four: Pair, name: str) -> None:
    """A pipeline only moves, so this too is Gloo's, bit for bit."""
    four.check(pipeline, name)
