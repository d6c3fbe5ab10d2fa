"""Programs that read their data through loaders, while ranks die and come."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lab.limits import limit
from lab.trainee import Log
from ringcomm import elastic

LENGTH, BATCH = 101, 4  # no multiple, so that batches cross the borders of epochs
EPOCHS = 3


class Numbers(Dataset[Any]):
    """Samples that know their index, and which process has read them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        draw = torch.Generator().manual_seed(index)
        worker = os.getpid() if get_worker_info() is not None else 0
        return torch.randn(6, generator=draw), index, worker


class Reader:
    """One rank that trains a line on numbers, and writes down what it reads."""

    def __init__(
        self, world: elastic.World, log: Log, workers: int, total: int | None, accumulate: int
    ) -> None:
        self.world, self.log, self.accumulate = world, log, accumulate
        self.sampler = elastic.Sampler(LENGTH, BATCH, seed=3, total_batch=total)
        fork = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        self.loader = DataLoader(Numbers(), batch_sampler=self.sampler, **fork)
        torch.manual_seed(7)
        net = nn.Linear(6, 1)
        self.net = net.double()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.model = nn.parallel.DistributedDataParallel(self.net, init_sync=False)
        world.track(model=self.model, opt=self.opt, sampler=self.sampler)
        self.workers: set[int] = set()
        log("tracked", rank=world.rank, epoch=self.sampler.epoch, step=world.step_number)

    def step(self, given: Any, dies: bool = False) -> None:
        """Train on one batch or several; die in the backward pass of the last."""
        world, batches = self.world, given if isinstance(given[0], list) else [given]
        step = world.step_number
        with world.step():
            self.opt.zero_grad()
            for number, (x, _, worker) in enumerate(batches, 1):
                last = number == len(batches)  # ranks of other shares communicate equally often
                with contextlib.nullcontext() if last else self.model.no_sync():
                    output = self.model(x.double()).squeeze(1)
                    if dies and last:
                        output.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
                    (((output - x.sum(1)) ** 2).mean() * world.weight).backward()
                self.workers |= set(worker.tolist())
            self.opt.step()
        if world.step_number > step:
            read = [index.tolist() for _, index, _ in batches]
            self.log("read", step=step, rank=world.rank, samples=read)

    def epochs(self) -> Iterator[Any]:
        for _ in range(self.sampler.epoch, EPOCHS):
            for given in self.world.batches(self.loader, accumulate=self.accumulate):
                if self.world.step_number % 3 == 1:
                    self.world.attempt(self.validate)
                yield given
            self.world.attempt(self.validate)
            self.log("epoch", now=self.sampler.epoch)

    def validate(self) -> None:
        dist.all_reduce(torch.ones(3))

    def end(self) -> None:
        parameters = [number for p in self.net.parameters() for number in p.flatten().tolist()]
        world = self.world
        told = {"step": world.step_number, "size": world.size, "decided": self.sampler.decided}
        self.log("end", parameters=parameters, workers=sorted(self.workers), **told)


def await_guest(world: elastic.World) -> None:
    deadline = time.monotonic() + limit(60)
    while not world._at.watch.wants_change:
        assert time.monotonic() < deadline, "no guest has come"
        time.sleep(0.002)


def read(
    world: elastic.World,
    log: Log,
    *,
    workers: int = 0,
    total: int | None = None,
    accumulate: int = 1,
    dies: int = -1,
    grows: int = -1,
) -> None:
    """Read all epochs. Rank 1 dies in step `dies`; a guest comes in step `grows`."""
    reader = Reader(world, log, workers, total, accumulate)
    for given in reader.epochs():
        if world.step_number == grows and world.rank == 0 and world.epoch == 1:
            await_guest(world)
        mine = world.rank == 1 and world.epoch == 0 and world.step_number == dies
        reader.step(given, dies=mine)
    reader.end()


def leave_the_loop(world: elastic.World, log: Log) -> None:
    """End the loop early, enter it again, and go on with what was prefetched."""
    reader = Reader(world, log, workers=2, total=None, accumulate=1)
    before = len(reader.sampler)
    while reader.sampler.epoch < 1:
        for given in world.batches(reader.loader):
            if world.step_number % 3 == 2 and given is not reader:
                reader.step(given)
                break
            reader.step(given)
    log("lengths", before=before, after=len(reader.sampler))
    reader.end()


def validate(world: elastic.World, log: Log) -> None:
    """Count each sample of a held-out set, in the midst of which rank 1 dies."""
    world.track(net=nn.Linear(6, 1))

    def count() -> torch.Tensor:
        seen = torch.zeros(LENGTH)
        mine = range(world.rank, LENGTH, world.size)
        for place, (_, index, _) in enumerate(DataLoader(Numbers(), BATCH, sampler=mine)):
            if (place, world.rank, world.epoch) == (2, 1, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            seen[index] += 1
        dist.all_reduce(seen)
        return seen

    log("end", seen=world.attempt(count).tolist(), size=world.size)
