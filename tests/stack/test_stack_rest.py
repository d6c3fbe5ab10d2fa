"""Checkpoints in the middle of a training, and accumulated gradients: as over Gloo."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import forms
from torch import nn
from torch.distributed.checkpoint import _async_process_executor as process_executor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lab.oracle import bits
from lab.pair import STEPS, Pair, State, only_ours
from lab.ranks import Rank, Ranks


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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 24)
        self.outer = nn.Linear(24, 8)
        self.spare = nn.Linear(8, 8)  # not used unless asked for

    def forward(self, data: torch.Tensor, *, spare: bool = False) -> torch.Tensor:
        scores: torch.Tensor = self.outer(torch.tanh(self.inner(data)))
        return self.spare(scores) if spare else scores


def batch(shard: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(1000 * step + shard)
    return torch.randn(6, 16, generator=seeded), torch.randint(0, 8, (6,), generator=seeded)


def loss_of(model: nn.Module, shard: int, step: int, **options: bool) -> torch.Tensor:
    data, labels = batch(shard, step)
    return nn.functional.cross_entropy(model(data, **options).float(), labels)


def full(model: nn.Module) -> State:
    """Return the whole of each parameter, whatever it is sharded by."""
    named = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    assert all(p.isfinite().all() for p in named.values()), "nothing to compare"
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named.items()}


def accumulate(rank: Rank) -> State:
    """DDP of n ranks is n times as large a batch on one."""
    torch.manual_seed(0)
    single, module = Net(), Net()
    module.load_state_dict(single.state_dict())
    model = DistributedDataParallel(module)
    for step in range(STEPS):
        for net, shards in ((model, [rank.index]), (single, list(range(rank.size)))):
            for shard in shards:
                (loss_of(net, shard, step, spare=True) / len(shards)).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    for mine, reference in zip(module.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)
    return full(model)


def test_three_ranks_accumulate() -> None:
    ranks = Ranks(3)
    try:
        ranks(only_ours, accumulate)
        ranks.leave()
    finally:
        ranks.kill()


Trained = tuple[nn.Module, torch.optim.Optimizer]


def laid_out(rank: Rank, layout: str, seed: int) -> Trained:
    """Return a model spread over the ranks as said, and an optimizer."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    mesh = init_device_mesh("cpu", (rank.size,))
    if layout == "sharded":
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "columns":
        plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def train(rank: Rank, trained: Trained, steps: range, layout: str = "") -> None:
    model, optimizer = trained
    shards = range(rank.size) if layout == "columns" else [rank.index]
    for step in steps:
        for shard in shards:  # tensor parallelism gives all ranks the same data
            (loss_of(model, shard, step, spare=True) / len(shards)).backward()
        optimizer.step()
        optimizer.zero_grad()


def load(trained: Trained, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(*trained)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*trained, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save(rank: Rank, trained: Trained, folder: Path, how: str) -> Any:
    """Return what is to be waited for."""
    model_state, optimizer_state = get_state_dict(*trained)
    state = {"model": model_state, "optimizer": optimizer_state}
    if how == "save":
        dcp.save(state, checkpoint_id=folder)
        return None
    kind = AsyncCheckpointerType.THREAD if how == "thread" else AsyncCheckpointerType.PROCESS
    own = dist.new_group()  # the training goes on in another
    return dcp.async_save(
        state, checkpoint_id=folder, process_group=own, async_checkpointer_type=kind
    )


def checkpoint(rank: Rank, folder: Path, how: str, layout: str) -> State:
    """Save in the middle, load into another layout, go on: as if nothing had happened."""
    folder = folder / dist.get_backend()
    trained = laid_out(rank, "sharded", 0)
    train(rank, trained, range(STEPS))
    half = {name: tensor.clone() for name, tensor in full(trained[0]).items()}
    saving = save(rank, trained, folder, how)
    train(rank, trained, range(STEPS, 2 * STEPS))
    if saving is not None:
        saving.result(timeout=60)
    dist.barrier()
    again = laid_out(rank, layout, 1)
    load(again, folder)
    for name, tensor in full(again[0]).items():
        assert bits(tensor) == bits(half[name]), name
    train(rank, again, range(STEPS, 2 * STEPS), layout)
    uninterrupted, resumed = full(trained[0]), full(again[0])
    for name, tensor in resumed.items():
        if layout == "sharded":
            assert bits(tensor) == bits(uninterrupted[name]), name
        torch.testing.assert_close(tensor, uninterrupted[name], rtol=1e-4, atol=1e-5)
    return uninterrupted | {f"resumed {name}": tensor for name, tensor in resumed.items()}


@pytest.mark.parametrize("layout", forms(["sharded", "replicated", "columns"], "sharded"))
def test_checkpoint(two: Pair, tmp_path: Path, layout: str) -> None:
    two.check(checkpoint, tmp_path, "save", layout)


@pytest.mark.slow
def test_checkpoint_by_a_thread(two: Pair, tmp_path: Path) -> None:
    two.check(checkpoint, tmp_path, "thread", "sharded")


def by_process(rank: Rank, folder: Path) -> State:
    """Save by torch's process for it, which talks over Gloo, but not in this one."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # else the host's name, which may not resolve
    me: Any = multiprocessing.current_process()
    me._config["daemon"] = False  # those may have no children
    try:
        return checkpoint(rank, folder, "process", "replicated")
    finally:
        process_executor._CHECKPOINT_PROCESS = None  # ends it
        del os.environ["MASTER_ADDR"]


def test_checkpoint_by_a_process(two: Pair, tmp_path: Path) -> None:
    two.ours(only_ours, by_process, tmp_path, seconds=100)


def saved(rank: Rank, folder: Path) -> State:
    trained = laid_out(rank, "sharded", 0)
    train(rank, trained, range(STEPS))
    save(rank, trained, folder, "save")
    return full(trained[0])


def loaded(rank: Rank, folder: Path) -> State:
    again = laid_out(rank, "sharded", 1)
    load(again, folder)
    return full(again[0])


@pytest.mark.slow
def test_checkpoint_for_more_ranks(two: Pair, four: Pair, tmp_path: Path) -> None:
    there, here = two.ours(only_ours, saved, tmp_path), four.ours(only_ours, loaded, tmp_path)
    for state in here:
        assert {name: digest for name, (digest, _) in state.items()} == {
            name: digest for name, (digest, _) in there[0].items()
        }
