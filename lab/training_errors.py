"""Elastic trainings in which one rank raises an error in a step, and its program goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.trainee import Log, Plan, digest, enter
from ringcomm.elastic import Evicted, ballot, changes

RAISES, ENDS = 5, 30  # steps: the one in which number 1 raises, and the last one


class Once:
    """Raises an error in the step that is to fail, on number 1 alone, once."""

    def __init__(self, plan: Plan, step_number: Callable[[], int]) -> None:
        self._left, self._step_number = plan.number == 1, step_number

    def __call__(self, error: type[BaseException] = ValueError) -> None:
        def fail() -> None:
            raise error("raised on purpose")

        self.fail(fail)

    def fail(self, how: Callable[[], object]) -> None:
        if self._left and self._step_number() == RAISES - 1:
            self._left = False
            how()


class Halves(torch.optim.SGD):
    """Raises when it has changed some of its parameters."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["lr"])
                    self.between()


@contextlib.contextmanager
def hidden(wanted: bool) -> Iterator[None]:
    """Catch what is raised, as a handler in a program may."""
    try:
        yield
    except Exception:
        if not wanted:
            raise


def interrupt_the_vote(once: Once) -> None:
    """Interrupt a rank when it has voted."""
    vote = ballot.vote

    def interrupted(*words: Any) -> Any:
        ballots = vote(*words)
        once(KeyboardInterrupt)
        return ballots

    changes.__dict__["vote"] = interrupted


def note_meetings(log: Log) -> None:
    meet = changes.Changes.meet

    def noted(self: changes.Changes, *words: Any, **more: Any) -> bool:
        log("meets", voted=self.voted)
        return meet(self, *words, **more)

    changes.Changes.meet = noted  # type: ignore[method-assign]


def arrange(where: str, once: Once, optimizer: Halves, log: Log) -> None:
    """Have the error raised there; `step` in `train` raises it elsewhere."""
    if where in ("optimizer", "hidden", "several", "second"):
        optimizer.between = once
    elif where == "interrupt":
        optimizer.between = lambda: once(KeyboardInterrupt)
    elif where == "pre hook":
        optimizer.register_step_pre_hook(lambda *_: once())
    elif where == "post hook":
        optimizer.register_step_post_hook(lambda *_: once())
    elif where == "vote":
        interrupt_the_vote(once)
    elif where == "group":
        note_meetings(log)


def train(plan: Plan, log: Log, *, where: str) -> None:
    """Train to the last step; write down what was caught, and the state after each step."""
    world = enter(plan, log)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DistributedDataParallel(net, init_sync=False)
    parts = [net[0], net[2]] if where in ("several", "second") else [net]
    optimizers = [Halves(part.parameters(), lr=0.1) for part in parts]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    tracked: dict[str, Any] = {f"opt{i}": opt for i, opt in enumerate(optimizers)}
    if where == "scaler":
        tracked["scaler"] = scaler
    world.track(model=model, sched=scheduler, **tracked)
    once = Once(plan, lambda: world.step_number)
    arrange(where, once, optimizers[-1], log)

    def step() -> None:
        with world.step():
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model(torch.randn(16, 8)).square().mean()
            with hidden(where == "group"):
                if where == "group":
                    once.fail(world._at.epochs.backend().abort)
                (scaler.scale(loss) if where == "scaler" else loss).backward()
            with hidden(where in ("hidden", "several")):
                for optimizer in optimizers:
                    dist.all_reduce(torch.ones(1)) if where == "several" else None
                    scaler.step(optimizer) if where == "scaler" else optimizer.step()
            if where == "scaler":
                once()
                scaler.update()
            with hidden(where == "hidden scheduler"):
                if where in ("scheduler", "hidden scheduler"):
                    once()
                scheduler.step()
            if where == "after":
                once()

    while world.step_number < ENDS:
        before = world.step_number
        try:
            step()
        except Evicted as error:
            log("evicted", text=str(error))
            return
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            log("caught", kind=type(error).__name__, text=str(error), step=world.step_number)
            if type(error).__name__ == "Diverged":
                raise
            continue
        if world.step_number > before:
            state = digest([*net.parameters(), torch.tensor(scheduler.get_last_lr())])
            log("step", step=world.step_number, size=world.size, digest=state)
    log("end", step=world.step_number, size=world.size, digest=digest(net.parameters()))
