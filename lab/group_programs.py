"""A program that holds process groups of its own, while ranks of its world die and come."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.data_programs import await_guest
from lab.trainee import Log, Plan, digest, enter
from ringcomm import elastic
from ringcomm.compression import hooks

MADE = {"pair": [0, 1], "back": [3, 2, 0], "all": [0, 1, 2, 3], "far": [2, 3], "late": [1, 2, 3]}
AFTER = "late"  # is made after `track`
OF_ITS_RANKS = "far"  # only its own ranks make it


class Holder:
    """One rank and its groups. It writes down how they are after each step."""

    def __init__(self, plan: Plan, log: Log) -> None:
        self.plan, self.log = plan, log
        self.world = world = enter(plan, log)
        self.number = torch.tensor([float(plan.number + 1)])  # a group's sum says who is in it
        self.net = nn.Linear(4, 1)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.groups: dict[str, Any] = {}
        self.newest: Any = None  # of on_change
        founds = world.size > 1
        self.make([name for name in MADE if name != AFTER and founds])
        world.on_change(self.change)
        world.track(net=self.net, opt=self.opt)
        self.make([AFTER] if founds else [])
        self.first = dict(self.groups)

    def make(self, names: list[str]) -> None:
        for name in names:
            more = {"use_local_synchronization": name == OF_ITS_RANKS, "sort_ranks": False}
            group = dist.new_group(MADE[name], **more)
            if isinstance(group, dist.ProcessGroup):
                self.groups[name] = group

    def change(self, change: elastic.Change) -> None:
        """Make a group of all, and drop the last one."""
        self.newest = dist.new_group(use_local_synchronization=change.size % 2 == 1)
        known = dist.distributed_c10d._world.pg_map
        self.log("change", size=change.size, known=len(known), kept=len(self.groups))

    def sum_of(self, group: Any) -> float:
        number = self.number.clone()
        dist.all_reduce(number, group=group)
        return number.item()

    def step(self, dies: str) -> None:
        """Make a step, in which every group works; this rank may die before one of them does."""
        world = self.world
        with world.step() as step:
            self.opt.zero_grad()
            self.net(torch.ones(2, 4)).sum().backward()
            sums = {}
            for name, group in self.groups.items():
                if name == dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                sums[name] = self.sum_of(group)
            if self.newest is not None:
                sums["newest"] = self.sum_of(self.newest)
            for parameter in self.net.parameters():
                dist.all_reduce(parameter.grad)
            self.opt.step()
        if step.counted:
            self.write(sums)

    def write(self, sums: dict[str, float]) -> None:
        for name, group in self.groups.items():
            ranks = dist.get_process_group_ranks(group)
            assert group is self.first.get(name, group)
            assert group.size() == dist.get_world_size(group) == len(ranks), name
            assert ranks[group.rank()] == dist.get_rank()
            assert (
                group.rank() == dist.get_rank(group) == dist.get_group_rank(group, dist.get_rank())
            )
            assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
        ranks_of = {n: dist.get_process_group_ranks(group) for n, group in self.groups.items()}
        self.log("step", step=self.world.step_number, sums=sums, ranks=ranks_of)


def hold(
    plan: Plan, log: Log, *, deaths: dict[int, tuple[int, str]], ends: int, grows: int = -1
) -> None:
    """Train to step `ends`. `deaths`: by number, the steps made before it, and in which group."""
    holder = Holder(plan, log)
    world, (at, where) = holder.world, deaths.get(plan.number, (-1, ""))
    while world.step_number < ends:
        if world.step_number == grows and world.rank == 0 and world.size < len(MADE["all"]):
            await_guest(world)
        holder.step(where if world.step_number == at else "")
    log("end", step=world.step_number, size=world.size)


def compress(plan: Plan, log: Log) -> None:
    """Train with compressed gradients, which go through groups of the hook's own. Number 0 dies.

    It does so in the backward pass of step 4, while the others wait for it in such a group.
    """
    world = enter(plan, log)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model = DistributedDataParallel(net, init_sync=False)
    model.register_comm_hook(hooks.CompressionState(flat=True), hooks.compress)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    world.track(model=model, opt=opt)
    while world.step_number < 6:
        with world.step() as step:
            opt.zero_grad()
            output = model(torch.ones(2, 8))
            if (plan.number, world.step_number) == (0, 3):
                output.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
            output.square().mean().backward()
            opt.step()
        if step.counted:
            log("step", step=world.step_number, digest=digest(net.parameters()))
    log("end", size=world.size)
