"""Steps of several optimizers: without copies where nothing comes in between, and right if it does.

Rank 1 dies between the optimizers. Without operations there, its step counts, and the next one is
computed again; with operations in each step it is that one; where they come for the first time it
counts without the second optimizer, on all ranks.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.course import starters
from lab.trainee import Log, digest
from ringcomm import elastic

DIES, ENDS = 4, 8


def train(world: elastic.World, log: Log, *, talks: str) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DistributedDataParallel(net, init_sync=False)
    opts = [torch.optim.Adam(net[0].parameters()), torch.optim.Adam(net[2].parameters())]
    world.track(model=model, first=opts[0], second=opts[1])
    number = world.rank
    while world.step_number < ENDS:
        with world.step() as step:
            here = world.step_number == DIES and world.epoch == 0
            for opt in opts:
                opt.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            opts[0].step()
            kept = bool(world._at.tracked._undo)  # type: ignore[union-attr]
            if here and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if talks == "always" or (talks == "once" and here):
                dist.all_reduce(torch.ones(1))
            opts[1].step()
        if step.counted:
            counts = [int(opt.state[opt.param_groups[0]["params"][0]]["step"]) for opt in opts]
            log(
                "step",
                step=world.step_number,
                kept=kept,
                counts=counts,
                digest=digest([*net.parameters()]),
            )
        else:
            log("aborted")
    counts = [int(opt.state[opt.param_groups[0]["params"][0]]["step"]) for opt in opts]
    log("end", counts=counts, digest=digest(net.parameters()), kept=kept)


@pytest.mark.parametrize(
    ("talks", "counts", "aborted"),
    [("never", [ENDS, ENDS], 1), ("always", [ENDS, ENDS], 1), ("once", [ENDS, ENDS - 1], 0)],
)
def test_a_death_between_two_optimizers(talks: str, counts: list[int], aborted: int) -> None:
    with starters(3, partial(train, talks=talks)) as some:
        ends = some.await_ends([0, 2])
        assert [end["counts"] for end in ends] == [counts] * 2
        assert ends[0]["digest"] == ends[1]["digest"]
        assert [len(some.events(number, "aborted")) for number in (0, 2)] == [aborted] * 2
        kept = [event["kept"] for event in some.events(0, "step")]
        assert kept[0]  # it is not known yet what comes after the first
        assert kept[1:DIES] == [talks == "always"] * (DIES - 1)
        assert kept[-1] == (talks != "never")
