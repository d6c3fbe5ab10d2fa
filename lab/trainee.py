"""One process of an elastic training, as tests start it, with a `Plan`.

It writes a line of JSON for everything that happens to it, with the time on the clock that all
processes of the machine share.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lab.fates import Fates
from lab.limits import limit
from lab.ranks import end_with_parent
from lab.simulated_device import pretend
from ringcomm import Options, elastic
from ringcomm.elastic import pulse
from ringcomm.elastic.epochs import Decided, Epochs

SAMPLES, FEATURES, CLASSES = 480, 24, 5


@dataclass(frozen=True)
class Plan:
    """The plan of a trainee. Times are seconds."""

    store: str
    start: int
    number: int = 0  # in the order of the trainees' start
    epochs: int = 2
    batch: int = 8
    pause: float = 0.0  # in each step
    workers: int = 0
    total_batch: int | None = None
    accumulate: int = 1
    min_size: int = 1
    max_size: int | None = None
    unit: int = 1
    joining: float = 60.0  # the timeout of join
    dead_after: float = 30.0
    hung_after: float = 120.0
    lease: float = 300.0
    elsewhere: str = ""  # another name of the host
    operation: float = 60.0  # the timeout of operations
    folder: str = ""  # for checkpoints
    fates: tuple[tuple[int, str, int], ...] = ()  # lab/fates.py
    leaves: tuple[tuple[int, int], ...] = ()  # (number, its last step)
    settings: dict[str, str] = field(default_factory=dict)  # for the environment
    errors: str = ""  # the file that its stderr is
    namespace: str = ""  # the network's: a host of its own
    cuda: bool = False  # on the simulated device
    hasty: bool = False  # guests that give no sign of life are given up as soon as in production


class Net(nn.Module):
    """Small, and with all that a step can change: BatchNorm's buffers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 48),
            nn.BatchNorm1d(48),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(48, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def data() -> TensorDataset:
    """Samples, classes, and the number of each sample."""
    draw = torch.Generator().manual_seed(1)
    samples = torch.randn(SAMPLES, FEATURES, generator=draw)
    classes = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
    return TensorDataset(samples, classes, torch.arange(SAMPLES))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of tensors: equal bits, equal hash."""
    result = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        result.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return result.hexdigest()


def digests(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Hashes of what a training changes."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "digest": digest([*net.parameters(), *states]),
        "buffers": digest(net.buffers()),
        "random": digest([torch.get_rng_state()]),
        "python": hash(random.getstate()),
    }


class Log:
    """Lines of JSON in a file, one write each, so that a killed process has written all of them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what: str, **more: Any) -> None:
        line = json.dumps({"at": time.monotonic(), "what": what, "pid": os.getpid(), **more})
        os.write(self._file, line.encode() + b"\n")


def ledger(sampler: elastic.Sampler, log: Log) -> None:
    """Have the sampler write down, at each decided step, which batches were used in it."""
    decide: Callable[[], None] = sampler._decide

    def write() -> None:
        deck = sampler._deck
        used = [batch for uuid in deck.members for batch in deck.queues[uuid][: deck.share(uuid)]]
        decide()
        log("used", batches=used, decided=sampler.decided)

    sampler._decide = write  # type: ignore[method-assign]


def write_decisions(log: Log) -> None:
    """Have what is decided about the members written down, also where no group works after it.

    They are told by their number, which is RANK: in a long run the system gives a pid twice.
    """
    agree: Callable[..., Decided] = Epochs.agree

    def wrapped(epochs: Epochs, *args: Any, **more: Any) -> Decided:
        decided = agree(epochs, *args, **more)
        members, guests = (
            [process.rank for process in some] for some in (epochs.members, epochs.guests)
        )
        log("decided", epoch=epochs.epoch, commits=decided.step, members=members, guests=guests)
        return decided

    Epochs.agree = wrapped  # type: ignore[method-assign, assignment]


def check_batch(sampler: elastic.Sampler, place: int, samples: torch.Tensor) -> None:
    """Require that the loader gave the batch that the deck has dealt."""
    deck = sampler._deck
    dealt = deck.batch(deck.queues[str(sampler._uuid)][place])
    if samples.tolist() != dealt:
        raise AssertionError(f"the loader gave samples {samples.tolist()}, and not {dealt}")


Program = Callable[[Plan, Log], None]


def enter_namespace(name: str) -> None:
    """Be on another host, as lab/hosts.py makes them, from now on."""
    file = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(file, 0) != 0:
        raise OSError(ctypes.get_errno(), f"entering the network namespace {name}")
    os.close(file)


def train(path: str, plan: Plan, program: Program | None = None) -> None:
    """Run one trainee to its end; `program` replaces the loop."""
    end_with_parent(7200)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if plan.errors:
        os.dup2(os.open(plan.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if plan.namespace:
        enter_namespace(plan.namespace)
    os.environ.update(plan.settings)
    torch.set_num_threads(1)
    be_patient(plan)
    if plan.cuda:
        pretend()
    log = Log(Path(path))
    log("began")
    try:
        (program or run)(plan, log)
    except BaseException as error:
        log("raised", kind=type(error).__name__, text=str(error))
        raise


def be_patient(plan: Plan) -> None:
    """Have guests enter at the first try, however busy the machine is."""
    if not plan.hasty:
        pulse.MISSED = round(limit(pulse.MISSED))


def enter(plan: Plan, log: Log) -> elastic.World:
    if plan.elsewhere:
        socket.gethostname = lambda: plan.elsewhere
    world = elastic.join(
        plan.store,
        start=plan.start,
        min_size=plan.min_size,
        max_size=plan.max_size,
        dead_after=timedelta(seconds=plan.dead_after),
        hung_after=timedelta(seconds=plan.hung_after),
        lease=timedelta(seconds=plan.lease),
        timeout=timedelta(seconds=plan.joining),
        options=Options(timedelta(seconds=plan.operation)),
    )
    log("joined", rank=world.rank, size=world.size)
    return world


def figures(world: elastic.World) -> dict[str, float]:
    """The numbers of `World.stats`, without its lists."""
    return {key: value for key, value in world.stats().items() if isinstance(value, (int, float))}


class Trainee:
    """The training of one process, in the world that it has joined."""

    def __init__(self, plan: Plan, log: Log) -> None:
        self.plan, self.log = plan, log
        mine = {phase: step for number, phase, step in plan.fates if number == plan.number}
        write_decisions(log)
        self.fates = Fates(mine, log)
        self.last_step = dict(plan.leaves).get(plan.number)
        self.world = self.fates.world = world = enter(plan, log)
        torch.manual_seed(5)
        self.net = Net().to(world.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.sampler = elastic.Sampler(SAMPLES, plan.batch, total_batch=plan.total_batch)
        loader = DataLoader(data(), batch_sampler=self.sampler, num_workers=plan.workers)
        self.loader = loader
        self.model = DistributedDataParallel(self.net, init_sync=False, bucket_cap_mb=0.002)
        ledger(self.sampler, log)
        world.on_change(self.write_change)
        torch.manual_seed(100 + world.rank)  # that of a guest is sown when it is admitted
        random.seed(world.rank)
        log("asks")
        world.track(model=self.model, opt=self.optimizer, sampler=self.sampler)
        self.fates.of_training(self.model, self.optimizer)
        if plan.folder:
            world.checkpoint(plan.folder, every=5)
        world.leave(on_signal=signal.SIGTERM)
        signal.signal(signal.SIGUSR1, lambda *_: self.fail())
        counters = world._at.counters
        log(
            "tracked",
            rank=world.rank,
            size=world.size,
            epoch=world.epoch,
            step=world.step_number,
            more=counters.commits - counters.steps,
        )

    def step(self, batch: Any) -> None:
        """Train on one batch, or on several."""
        world = self.world
        with world.step():
            self.optimizer.zero_grad()
            several = isinstance(batch[0], (list, tuple))
            for place, (x, y, samples) in enumerate(batch if several else [batch]):
                check_batch(self.sampler, place, samples)
                x, y = x.to(world.device), y.to(world.device)
                (F.cross_entropy(self.model(x), y) * world.weight).backward()
            time.sleep(self.plan.pause)
            self.optimizer.step()
            assert dist.get_rank() == world.rank  # also where a rank is lost just then

    def write_step(self) -> None:
        world, state = self.world, digests(self.net, self.optimizer)["digest"]
        self.log("step", step=world.step_number, rank=world.rank, size=world.size, digest=state)

    def write_change(self, change: elastic.Change) -> None:
        self.log(
            "change",
            epoch=change.epoch,
            step=change.step,
            size=change.size,
            rank=change.rank,
            lost=[process.pid for process in change.lost],
            joined=[process.pid for process in change.joined],
            ms=change.seconds * 1e3,
            stats=figures(self.world),
        )

    def fail(self) -> None:
        """Have the group fail, if there is one just then; nobody is lost."""
        with contextlib.suppress(ValueError):
            self.world._at.epochs.backend().abort()

    def end(self) -> None:
        """Write down what was reached."""
        self.log(
            "end",
            step=self.world.step_number,
            stats=figures(self.world),
            **digests(self.net, self.optimizer),
        )


def run(plan: Plan, log: Log) -> None:
    """Train to the last epoch, or until this trainee leaves."""
    trainee = Trainee(plan, log)
    world, steps = trainee.world, trainee.world.step_number
    try:
        for _ in range(trainee.sampler.epoch, plan.epochs):
            for batch in world.batches(trainee.loader, accumulate=plan.accumulate):
                if trainee.last_step == world.step_number + 1:
                    world.leave()
                trainee.step(batch)
                if world.step_number > steps:
                    steps = world.step_number
                    trainee.write_step()
    finally:
        trainee.end()
