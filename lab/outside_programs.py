"""A program that averages its loss after each step, while ranks of its world die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.trainee import Log, Plan, digest, enter
from ringcomm.elastic import ballot, changes

AT, ENDS = 3, 6  # steps: the one after which rank 1 dies, and the last one


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise dist.DistBackendError("planned")


def once(when: Callable[[], bool], what: Callable[[], None]) -> Callable[[], None]:
    """Do it the first time."""
    done: list[bool] = []

    def call() -> None:
        if not done and when():
            done.append(True)
            what()

    return call


def log_loss(plan: Plan, log: Log, *, where: str, who: int) -> None:
    """Train to the last step. Around the all_reduce after step AT, `who` dies or fails.

    `where`: "before" it, "between" it and its vote, or "after" it. With "behind" nobody dies: that
    rank sees the vote fail, while the others see it count and go on to the next step.
    """
    world = enter(plan, log)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    model = DistributedDataParallel(net, init_sync=False)
    world.track(model=model, opt=opt)
    now = {"outside": False}
    event = once(
        lambda: plan.number == who and now["outside"] and world.step_number == AT,
        fail if where == "behind" else die,
    )
    vote: Any = ballot.vote

    def voting(*words: Any) -> Any:
        if where == "between":
            event()
        ballots = vote(*words)
        if where == "behind":
            event()
        return ballots

    changes.__dict__["vote"] = voting
    while world.step_number < ENDS:
        with world.step() as step:
            opt.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            opt.step()
        if not step.counted:
            continue
        now["outside"] = True
        mean = torch.tensor([1.0, float(plan.number)])
        if where == "before":
            event()
        dist.all_reduce(mean)
        if where == "after":
            event()
        dist.barrier()
        now["outside"] = False
        log("step", step=world.step_number, digest=digest(net.parameters()), sums=mean.tolist())
    log("end", size=world.size)


def tell_objects(plan: Plan, log: Log) -> None:
    """Rank 1 dies before an operation that is not called again, and then in an attempt with it."""
    world = enter(plan, log)
    net = nn.Linear(4, 1)
    world.track(net=net)
    said: list[Any] = [None] * world.size
    if plan.number == 1:
        die()
    try:
        dist.all_gather_object(said, plan.number)
    except dist.DistBackendError as error:
        log("raised", text=str(error))

    def tell() -> list[Any]:
        told: list[Any] = [None] * world.size
        dist.all_gather_object(told, plan.number)
        return told

    log("told", numbers=world.attempt(tell))
    log("end")
