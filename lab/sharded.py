"""Sharded trainings in the units of an elastic world, for Starters: a function for each process.

A rank may die at a place in a step, or its unit leave before that step as planned. Each applied
step is written down with a hash of this rank's shard, and of what its optimizer holds.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from lab.limits import limit
from lab.trainee import CLASSES, FEATURES, Log
from ringcomm import elastic
from ringcomm.elastic.copies import Copies

KINDS = ("shard", "both", "tensor")  # FSDP in units, HSDP, and tensor parallelism
SAMPLES, BATCH = 320, 4


@dataclass(frozen=True)
class Part:
    """The events of a training: `at` and `grows` are steps, `dies` and `leaves` processes.

    `place` is where in the step after `at` one dies, or "copy": while the shards of step `at` are
    copied. With `validates` the ranks do something together after that step.
    """

    kind: str = "shard"
    steps: int = 10
    dies: int = -1
    place: str = "backward"
    leaves: tuple[int, ...] = ()
    at: int = 4
    grows: int = 0  # then rank 0 waits for guests, if the world has not more than `below` ranks
    below: int = 0  # without: it has fewer than at its start
    validates: int = -1
    waits: bool = False  # for each checkpoint to be on the disk, before the next step
    checkpoints: str = ""
    pause: float = 0.0
    gate: str = ""  # a file: nobody goes on from step `at` before it is there
    drops: float = 0.1  # of the inputs; checkpoints hold no random numbers


class Dying(nn.Module):
    """Between two layers: the rank may die here, in the forward or the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == "forward":
            die()
        if self.place == "backward":
            x.register_hook(lambda gradient: die())
        return x


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_copy(step: int) -> None:
    """Have this rank die when it has sent the size of its shard of that step, and not the shard."""
    exchange: Callable[..., Any] = Copies._exchange

    def dying(copies: Copies, generation: Any, *rest: Any) -> Any:
        if generation.own.step == step:
            die()
        return exchange(copies, generation, *rest)

    Copies._exchange = dying  # type: ignore[method-assign, assignment]


def model_of(world: elastic.World, kind: str, drops: float = 0.0) -> tuple[nn.Module, Dying]:
    """Return a model of uneven layers, sharded over the world's mesh, and the place to die in.

    As in most programs, the outermost module has parameters of its own: those of the head. Their
    gradients come first in a backward pass, and are reduced last.
    """
    torch.manual_seed(world.rank)  # `track` gives all the state of the first
    dying = Dying()
    body = nn.Linear(FEATURES, 34)
    net = nn.Sequential(nn.Dropout(drops), body, nn.ReLU(), dying, nn.Linear(34, CLASSES))
    if kind == "plain":
        return DistributedDataParallel(net, init_sync=False), dying
    if kind == "tensor":
        plan = {"1": ColwiseParallel(), "4": RowwiseParallel()}
        parallelize_module(net, world.mesh["shard"], plan, src_data_rank=None)
        torch.manual_seed(world.rank // 2)  # the ranks of a unit drop out the same inputs
        return net, dying
    mesh = world.mesh if kind == "both" else world.mesh["shard"]
    fully_shard(body, mesh=mesh)
    return fully_shard(net, mesh=mesh), dying


def loader_of(kind: str) -> tuple[elastic.Sampler, Any]:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, FEATURES, generator=draw)
    data = TensorDataset(x, x[:, :CLASSES].argmax(1), torch.arange(SAMPLES))
    sampler = elastic.Sampler(SAMPLES, BATCH, seed=3, per_unit=kind == "tensor")
    return sampler, DataLoader(data, batch_sampler=sampler)


def digest(net: nn.Module, opt: torch.optim.Optimizer) -> str:
    states = [state[name] for state in opt.state.values() for name in sorted(state)]
    return digest_of([*net.parameters(), *filter(torch.is_tensor, states)])


def digest_of(tensors: Iterable[Any]) -> str:
    result = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        result.update(part.detach().contiguous().numpy().tobytes())
    return result.hexdigest()


def train(world: elastic.World, log: Log, part: Part) -> None:
    """Train over all steps, and write each of them down."""
    number, below = int(os.environ["RANK"]), part.below or world.size - 1
    if number == part.dies and part.place == "copy":
        die_in_copy(part.at)
    net, dying = model_of(world, part.kind, part.drops)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sched = CosineAnnealingLR(opt, 100)
    sampler, loader = loader_of(part.kind)
    world.on_change(lambda change: log("change", size=change.size, ms=change.seconds * 1e3))
    log("asks")
    world.track(net=net, opt=opt, sched=sched, sampler=sampler)
    if part.checkpoints:
        world.checkpoint(part.checkpoints, every=2)
    log("tracked", step=world.step_number, place=place_of(world), rank=world.rank)
    while world.step_number < part.steps:
        for x, y, samples in world.batches(loader):
            if number in part.leaves and world.step_number == part.at - 1:
                world.leave()
            if world.step_number == part.grows and world.size <= below and world.rank == 0:
                await_guests(world)
            dying.place = part.place if (number, world.step_number) == (part.dies, part.at) else ""
            with world.step() as step:
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                if dying.place == "between":
                    die()
                opt.step()
                if dying.place == "end":
                    die()
            sched.step()
            if step.counted:
                log(
                    "step",
                    step=world.step_number,
                    digest=digest(net, opt),
                    place=place_of(world),
                    size=world.size,
                    samples=samples.tolist(),
                )
                if world._saving is not None and part.waits:
                    world._end_body()
                    world._saving.checkpoints.finish()
                if world.step_number == part.validates:
                    log("validated", sum=world.attempt(lambda: validate(number, part)))
            time.sleep(part.pause)
            if part.gate and world.step_number >= part.at:
                pass_gate(Path(part.gate))
            if world.step_number >= part.steps:
                break
    stats, copies = world.stats(), world._at.copies
    told = {name: stats[name] for name in ("steps_lost", "restored")}  # type: ignore[literal-required]
    log("end", size=world.size, digest=digest(net, opt), copied=copies.nbytes, **told)


def validate(number: int, part: Part) -> float:
    if number == part.dies and part.place == "attempt":
        die()
    value = torch.ones(1)
    torch.distributed.all_reduce(value)
    return float(value.item())


def pass_gate(gate: Path) -> None:
    deadline = time.monotonic() + limit(60)
    while not gate.exists():
        assert time.monotonic() < deadline, f"nobody opens {gate}"
        time.sleep(0.002)


def await_guests(world: elastic.World) -> None:
    deadline = time.monotonic() + limit(60)
    while not world._at.watch.wants_change:
        assert time.monotonic() < deadline, "no guests have come"
        time.sleep(0.002)


def churn(world: elastic.World, log: Log, kind: str) -> None:
    """Train without end, with pauses of its own; leave at SIGTERM."""
    pause = random.uniform(0, 0.004)
    world.leave(on_signal=signal.SIGTERM)
    net, _ = model_of(world, kind)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sampler, loader = loader_of(kind)
    world.on_change(lambda change: log("change", size=change.size, step=change.step))
    world.track(net=net, opt=opt, sampler=sampler)
    while True:
        for x, y, _ in world.batches(loader):
            with world.step() as step:
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
                opt.step()
            if step.counted:
                told = {"digest": digest(net, opt), "place": place_of(world)}
                log("step", step=world.step_number, size=world.size, **told)
            time.sleep(pause)


def place_of(world: elastic.World) -> int:
    """Return this rank's place in its unit."""
    return 0 if world._groups is None else world._groups.place


def by_epochs(world: elastic.World, log: Log, dies: int, at: int, grows: int, epochs: int) -> None:
    """Train over so many epochs of data; a rank dies, and another one comes much later."""
    number, founders = int(os.environ["RANK"]), world.size
    net, _ = model_of(world, "shard")
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    sampler, loader = loader_of("shard")
    world.track(net=net, opt=opt, sampler=sampler)
    for epoch in range(sampler.epoch, epochs):
        for x, y, _ in world.batches(loader):
            if world.step_number == grows and world.size < founders and world.rank == 0:
                await_guests(world)
            with world.step():
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
                if (number, world.step_number) == (dies, at):
                    die()
                opt.step()
        log("epoch", mine=epoch, step=world.step_number)
    log("end", step=world.step_number, epoch=sampler.epoch)
