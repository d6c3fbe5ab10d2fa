"""Programs that use a world as they should not, one function each; rank 1 is the odd one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from lab.trainee import Log
from ringcomm import elastic

ENDS = 8


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(4)])


class Line:
    """A line to be trained, and all that goes with it."""

    def __init__(self, world: elastic.World, outputs: int = 2, kind: Any = torch.optim.SGD) -> None:
        self.world = world
        self.net = nn.Linear(4, outputs)
        self.opt = kind(self.net.parameters(), lr=0.1)
        self.model = nn.parallel.DistributedDataParallel(self.net, init_sync=False)
        self.sampler = elastic.Sampler(40, 4)
        self.loader = DataLoader(Numbers(), batch_sampler=self.sampler)

    def track(self) -> Line:
        self.world.track(model=self.model, opt=self.opt, sampler=self.sampler)
        return self

    def backward(self) -> None:
        self.opt.zero_grad()
        self.model(torch.ones(3, 4)).sum().backward()

    def step(self) -> None:
        with self.world.step():
            self.backward()
            self.opt.step()

    def train(self) -> None:
        while self.world.step_number < ENDS:
            self.step()

    def bits(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.net.parameters()]


def goes_on(line: Line, log: Log) -> None:
    line.train()
    log("end", size=line.world.size, step=line.world.step_number)


def refused(log: Log, name: str, function: Callable[[], Any]) -> None:
    """Write down how something is refused."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        log("refused", name=name, kind=type(error).__name__, text=str(error))
    else:
        log("refused", name=name, kind="", text="")


# ---- what is refused, and the world goes on


def misuses(world: elastic.World, log: Log) -> None:
    """Every rank does the same wrong things; each is refused, and none leaves a trace."""
    line = Line(world)
    other = elastic.Sampler(40, 4)
    refused(log, "early step", lambda: world.step().__enter__())
    refused(log, "early batches", lambda: next(iter(world.batches(line.loader))))
    refused(log, "early checkpoint", lambda: world.checkpoint("nowhere", every=1))
    refused(log, "stateless", lambda: world.track(thing=object()))
    refused(log, "zero", lambda: world.track(opt=_zero(line)))
    refused(log, "two samplers", lambda: world.track(first=line.sampler, two=other))
    line.track()
    refused(log, "track twice", lambda: world.track(model=line.model))
    before = line.bits()
    line.backward()
    refused(log, "outside", lambda: line.opt.step())
    refused(log, "stranger", lambda: torch.optim.SGD(line.net.parameters(), lr=1).step())
    loaders: list[tuple[str, Any]] = [
        ("no loader", [1, 2]),
        ("iterable", DataLoader(Stream(), batch_size=2)),
        (
            "own sampler",
            DataLoader(
                Numbers(),
                batch_sampler=BatchSampler(SequentialSampler(range(40)), 4, drop_last=False),
            ),
        ),
        ("plain loader", DataLoader(Numbers(), batch_size=4)),
        ("another sampler", DataLoader(Numbers(), batch_sampler=other)),
    ]
    for name, loader in loaders:
        refused(log, name, lambda: next(iter(world.batches(loader))))  # noqa: B023 - at once
    refused(log, "accumulate", lambda: next(iter(world.batches(line.loader, accumulate=0))))
    refused(log, "unused", lambda: list(world.batches(line.loader)))
    refused(log, "nested", lambda: _nested(line))
    refused(log, "attempt inside", lambda: _inside(line, lambda: world.attempt(int)))
    refused(log, "step inside", lambda: world.attempt(lambda: line.step()))
    log("untouched", same=line.bits() == before)
    refused(log, "in place", lambda: _in_place(line))
    refused(log, "two steps a batch", lambda: _two_a_batch(line))
    if os.fork() == 0:
        refused(log, "forked", lambda: line.step())
        os._exit(0)
    os.wait()
    goes_on(line, log)


def _zero(line: Line) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(line.net.parameters(), torch.optim.SGD, lr=0.1)


def _nested(line: Line) -> None:
    with line.world.step():
        line.step()


def _inside(line: Line, function: Callable[[], Any]) -> None:
    with line.world.step():
        function()


def _two_a_batch(line: Line) -> None:
    for _ in line.world.batches(line.loader):
        line.step()
        line.step()


def _in_place(line: Line) -> None:
    for x in line.world.batches(line.loader):
        with line.world.step():
            line.opt.zero_grad()
            line.model(x.div_(255)).sum().backward()
            line.opt.step()


# ---- what ends one rank, and the others go on


def raises(world: elastic.World, log: Log) -> None:
    """A ValueError of the program, in one rank's forward pass."""
    line = Line(world).track()
    while world.step_number < ENDS:
        with world.step():
            if world.step_number == 3 and world.rank == 1 and world.epoch == 0:
                raise ValueError("a sample is broken")
            line.backward()
            line.opt.step()
    goes_on(line, log)


def steps_twice(world: elastic.World, log: Log) -> None:
    """One rank's optimizer makes two steps: the first one counts, so it is too late to raise."""
    line = Line(world).track()
    while world.step_number < ENDS:
        with world.step():
            line.backward()
            line.opt.step()
            if world.step_number == 3 and world.rank == 1 and world.epoch == 0:
                line.opt.step()
    goes_on(line, log)


def raises_and_goes_on(world: elastic.World, log: Log, errors: int) -> None:
    """The same, but the program catches it, and takes the step once more."""
    torch.manual_seed(world.rank)
    line, caught = Line(world).track(), 0
    while world.step_number < ENDS:
        try:
            with world.step():
                line.opt.zero_grad()
                output = line.model(torch.ones(3, 4) * torch.rand(1))
                if world.step_number in (3, 5) and world.rank == 1 and caught < errors:
                    caught += 1
                    raise ValueError("a sample is broken")
                output.sum().backward()
                line.opt.step()
        except ValueError:
            pass
    log("end", size=world.size, step=world.step_number, same=line.bits(), caught=caught)


def interrupts(world: elastic.World, log: Log) -> None:
    line = Line(world).track()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while world.step_number < ENDS:
        with world.step():
            if world.step_number == 3 and world.rank == 1 and world.epoch == 0:
                os.kill(os.getpid(), signal.SIGINT)
            line.backward()
            line.opt.step()
    goes_on(line, log)


def has_another_shape(world: elastic.World, log: Log) -> None:
    """A founder whose model is another one."""
    goes_on(Line(world, outputs=3 if world.rank == 1 else 2).track(), log)


def joins_with_another_shape(world: elastic.World, log: Log) -> None:
    """A joiner whose model is another one: it waits for the others' third step."""
    joins = world.size == 1
    line = Line(world, outputs=3 if joins else 2).track()
    while not world.epoch:  # until the guest came, and went
        line.step()
    goes_on(line, log)


def joins_oddly(world: elastic.World, log: Log, how: str) -> None:
    """A joiner that differs in one thing; the members train until it came, and went."""
    odd = how if world._changes is None else ""
    founders = 0 if odd else world.size
    line = Line(world)
    if odd == "frozen":
        line.net.bias.requires_grad_(False)
    if odd in ("frozen", "layout"):
        unused = odd == "layout"
        line.model = nn.parallel.DistributedDataParallel(
            line.net, init_sync=False, find_unused_parameters=unused
        )
    line.track()
    if odd == "rate":
        line.opt.param_groups[0]["lr"] = 0.2
    if odd == "parameters":
        line.net.weight.data += 1
    if odd == "loader":
        line.loader = DataLoader(
            Numbers(), batch_sampler=line.sampler, num_workers=1, multiprocessing_context="fork"
        )
    while not (world.epoch >= 2 and world.size == founders):
        for x in world.batches(line.loader):
            with world.step():
                line.opt.zero_grad()
                line.model(x).sum().backward()
                if odd == "operations":
                    torch.distributed.all_reduce(torch.ones(3))
                line.opt.step()
    log("end", size=world.size)


def wraps_errors(world: elastic.World, log: Log) -> None:
    """A program that makes other errors of those in its step."""
    line = Line(world).track()
    while world.step_number < ENDS:
        with world.step():
            if (world.step_number, world.rank, world.epoch) == (3, 1, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                line.backward()
            except RuntimeError as error:
                raise ValueError("a step of mine has failed") from error
            line.opt.step()
    log("end", size=world.size, step=world.step_number)


# ---- what ends all


def tracks_other_things(world: elastic.World, log: Log) -> None:
    Line(world, kind=torch.optim.Adam if world.rank == 1 else torch.optim.SGD).track()


def differs_at_once(world: elastic.World, log: Log) -> None:
    """Parameters of one rank change outside of steps; the world compares in an epoch's first."""
    line = Line(world).track()
    if world.rank == 1:
        line.net.weight.data += 1
    goes_on(line, log)


def differs_later(world: elastic.World, log: Log) -> None:
    from ringcomm.elastic import changes

    changes.COMPARE_EVERY = 5
    line = Line(world).track()
    while world.step_number < 100:
        line.step()
        if (world.step_number, world.rank, world.epoch) == (3, 1, 0):
            line.net.weight.data += 1
    log("end", size=world.size)


def skips_a_step(world: elastic.World, log: Log) -> None:
    """One rank finds its own loss too large, and does not call its optimizer."""
    line = Line(world).track()
    while world.step_number < ENDS:
        with world.step():
            line.backward()
            if not (world.rank == 1 and world.step_number == 3):
                line.opt.step()


def has_another_rate(world: elastic.World, log: Log) -> None:
    line = Line(world).track()
    if world.rank == 1:
        line.opt.param_groups[0]["lr"] = 0.2
    goes_on(line, log)


def has_another_loader(world: elastic.World, log: Log) -> None:
    line = Line(world).track()
    loader = line.loader
    if world.rank == 1:
        loader = DataLoader(
            Numbers(), batch_sampler=line.sampler, num_workers=1, multiprocessing_context="fork"
        )
    for x in world.batches(loader):
        with world.step():
            line.opt.zero_grad()
            line.model(x).sum().backward()
            line.opt.step()


def makes_fewer_steps(world: elastic.World, log: Log) -> None:
    """One rank attempts where the others step."""
    line = Line(world).track()
    line.train()
    if world.rank == 1:
        world.attempt(int)
    else:
        with world.step():
            pass


def calls_other_operations(world: elastic.World, log: Log) -> None:
    """Operations that do not fit together fail again and again, and nobody is lost by it."""
    line = Line(world).track()
    line.step()
    with world.step():
        if world.rank == 1:
            torch.distributed.all_reduce(torch.ones(3))
        else:
            torch.distributed.all_reduce(torch.ones(4))
    while True:
        with world.step():
            torch.distributed.all_reduce(torch.ones(3 + world.rank))
