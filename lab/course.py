"""The course that elastic trainings of tests take, in processes of their own.

Rank 1 of three dies in step `DIES`, at a place in it. A guest comes in step `GROWS`, and the
training ends with step `ENDS`. Nothing depends on time, so the results are those of a plan.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.limits import limit
from lab.ranks import HOST, end_with_parent
from lab.trainee import CLASSES, FEATURES, Log, Plan, be_patient
from lab.trainees import Trainees
from ringcomm import Options, elastic

DIES, GROWS, ENDS = 4, 8, 12
FAILURES = [(0, 4, 1), (1, 6, 0), (2, 6, 1)]  # epoch, step, rank

Program = Callable[[elastic.World, Log], None]


def begin(path: str, plan: Plan, program: Program) -> None:
    """Be one process: join the world, and run the program."""
    end_with_parent(600)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(plan.settings)
    torch.set_num_threads(1)
    be_patient(plan)
    log = Log(Path(path))
    log("began")
    try:
        world = elastic.join(
            plan.store,
            start=plan.start,
            min_size=plan.min_size,
            unit=plan.unit,
            timeout=timedelta(seconds=plan.joining),
            options=Options(timedelta(seconds=plan.operation)),
        )
        log("joined", rank=world.rank)
        program(world, log)
    except BaseException as error:
        log("raised", kind=type(error).__name__, text=str(error))
        raise


class Starters(Trainees):
    """Processes that run programs of their own."""

    def start(self, count: int = 1, **changes: Any) -> list[int]:
        """Start so many; returns their numbers, which are the ranks of the first ones."""
        numbers = list(range(len(self.processes), len(self.processes) + count))
        for number in numbers:
            settings = {"RANK": str(number), **self.plan.settings}
            plan = replace(self.plan, settings=settings, **changes)
            args = (str(self.folder / f"trainee-{number}"), plan, self.program)
            process = self._context.Process(target=begin, args=args)  # it may have workers
            process.start()
            self.processes.append(process)
        return numbers


@contextmanager
def starters(count: int, program: Program, **plan: Any) -> Iterator[Starters]:
    """So many processes and a store of their own, which is this process's."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        made = Plan(**{"store": f"{HOST}:{store.port}", "start": count, **plan})
        some = Starters(made, Path(folder), program)  # type: ignore[arg-type]
        try:
            some.start(count)
            yield some
        finally:
            some.end()


@dataclass
class Course:
    """Events of a training, as they happen to one rank of a world."""

    world: elastic.World
    log: Log
    place: str  # where in the step rank 1 dies; "" and "fails": nobody does, and no guest comes

    def at(self, place: str) -> None:
        """Be at a place in a step; the rank may die here, or have a failure of the group."""
        if place == self.place and place == "fails":
            if (self.world.epoch, self.world.step_number, self.world.rank) in FAILURES:
                raise dist.DistBackendError("planned")
        elif place == self.place and self._is_mine():
            os.kill(os.getpid(), signal.SIGKILL)

    def backward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, in whose backward pass the rank may die."""
        if self.place == "backward" and self._is_mine():
            tensor.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        return tensor

    def _is_mine(self) -> bool:
        world = self.world
        return (world.epoch, world.step_number, world.rank) == (0, DIES, 1)

    def await_guest(self) -> None:
        """Have rank 0 wait, in the step in which the guest comes."""
        world = self.world
        if self.place in ("", "fails") or (world.rank, world.step_number, world.size) != (
            0,
            GROWS,
            2,
        ):
            return
        deadline = time.monotonic() + limit(60)
        while not world._at.watch.wants_change:
            assert time.monotonic() < deadline, "no guest has come"
            time.sleep(0.002)


@dataclass
class Training:
    """The tracked objects, a step, and the values that are equal on all ranks at the end."""

    tracked: dict[str, Any]
    step: Callable[[], None]
    tell: Callable[[], dict[str, Any]]
    after: Callable[[], None] = lambda: None


def run(world: elastic.World, log: Log, make: Callable[[Course], Training], place: str) -> None:
    """Train over the whole course what `make` makes."""
    torch.manual_seed(world.rank)  # `track` gives all the state of rank 0
    course = Course(world, log, place)
    world.on_change(lambda change: log("change", size=change.size, step=change.step))
    training = make(course)
    world.track(**training.tracked)
    torch.manual_seed(100 + world.rank)
    log("tracked", rank=world.rank, step=world.step_number)
    while world.step_number < ENDS:
        with world.step():
            course.await_guest()
            training.step()
            course.at("end")
        training.after()
    own = [torch.get_rng_state().tolist(), [b.tolist() for b in _buffers(training)]]
    told = {"same": training.tell(), "own": own, "stats": world.stats()}
    log("end", rank=world.rank, size=world.size, **told)


def _buffers(training: Training) -> list[torch.Tensor]:
    modules = [m for m in training.tracked.values() if isinstance(m, torch.nn.Module)]
    return [buffer for module in modules for buffer in module.buffers()]


def batch(world: elastic.World, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples that only the step and the rank decide on."""
    draw = torch.Generator().manual_seed(world.step_number * 100 + world.rank * 10 + part)
    x = torch.randn(8, FEATURES, generator=draw)
    return x, torch.randint(0, CLASSES, (8,), generator=draw)
