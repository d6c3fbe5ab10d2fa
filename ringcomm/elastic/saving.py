"""When a world writes its checkpoints, and which of those on all ranks' disks it goes on from."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist

from ringcomm._runtime.process import say
from ringcomm.elastic import ddp, transfer, units
from ringcomm.elastic.changes import COUNTERS, Changes
from ringcomm.elastic.checkpoint import Checkpoints, Found
from ringcomm.elastic.shards import part_of
from ringcomm.elastic.snapshot import memory_of

NO_CHECKPOINT = -1  # instead of its step


class Saving:
    """Writes and reads `Checkpoints` for a world; with units, those of this rank's shard."""

    def __init__(self, run: str, checkpoints: Checkpoints, changes: Changes) -> None:
        self._run, self.checkpoints, self.changes = run, checkpoints, changes

    def load(self) -> None:
        """Load the newest whole checkpoint of all ranks' folders, if any has one, and share it.

        The folders may be one, or each on its host's own disk. Shards are all of one step. Raises
        what `newest` raises, where no rank has a whole one and this rank has damaged ones, and
        RuntimeError on all ranks where only some shards have any.
        """
        places = [process.place for process in self.changes.epochs.members]
        rank, newest, damage, most = self.changes.epochs.rank, None, None, None
        mine = self.checkpoints.latest_step()
        while (step := _newest_of_all(steps := _told(mine), places)) >= 0:
            if max(steps) > step:  # of a shard, and others are behind
                most, newest = step, None
                mine = self.checkpoints.latest_step(most)
                continue
            givers = [_holder(step, steps, place, places) for place in places]
            giver = givers[rank]
            if rank == giver and newest is None:
                try:
                    newest = self.checkpoints.newest(most)
                except RuntimeError as error:
                    damage = error
                mine = newest.step if newest else NO_CHECKPOINT
            told = _told(mine)
            if all(told[giver] == step for giver in givers):
                break
        else:
            if damage is not None:
                raise damage
            _require_none(steps, places)
            giver, newest = places.index(places[rank]), None
        if rank == giver and newest is not None:
            self._take(newest)
        self.changes.share_state(giver)

    def _take(self, newest: Found) -> None:
        state = self.checkpoints.load(newest, dict(self._named()))
        for name, thing in self._named():
            transfer.load(thing, state[name])
        say(f"elastic: goes on from checkpoint {newest.path}, step {newest.step}")
        self.changes.counters.steps = newest.step

    def save(self, certainly: bool = False) -> None:
        """Write a checkpoint if one is due; `certainly`: in any case, to its end.

        The first rank does, and in units the first one that holds each shard.
        """
        changes, step = self.changes, self.changes.counters.steps
        due = self.checkpoints.due(step, time.monotonic())  # on all ranks: any may be 0 later
        epochs = changes.epochs
        first = units.replicas_of(epochs.me, epochs.members)[0]
        if epochs.rank != first or not (due or certainly):
            return
        if certainly:
            with contextlib.suppress(RuntimeError):  # the one before has failed: it was logged
                self.checkpoints.finish()
        state = {name: thing.state_dict() for name, thing in self._named()}
        assert changes.tracked is not None
        later = {memory_of(part_of(t)) for t in changes.tracked.changed_by_optimizers()}
        about = {"run": self._run, "epoch": changes.epochs.epoch}
        self.checkpoints.save(step, state, about, later)
        if certainly:
            self.checkpoints.finish()

    def _named(self) -> list[tuple[str, Any]]:
        tracked = self.changes.tracked
        assert tracked is not None
        return [
            (name, ddp.unwrapped(thing) if isinstance(thing, torch.nn.Module) else thing)
            for name, thing in tracked.objects.items()
            if name != COUNTERS
        ]


def _newest_of_all(steps: list[int], places: list[int]) -> int:
    """Return the newest step of which each place in a unit has a checkpoint, as ranks tell; -1."""
    return min(
        max(step for step, held in zip(steps, places, strict=True) if held == place)
        for place in places
    )


def _require_none(steps: list[int], places: list[int]) -> None:
    """Raise RuntimeError if any shard has a checkpoint: to begin anew would lose the work."""
    held = {place for step, place in zip(steps, places, strict=True) if step >= 0}
    if held:
        missing = ", ".join(str(place) for place in sorted(set(places) - held))
        raise RuntimeError(
            f"there are checkpoints, but of shard {missing} there is none of the same step or an "
            "earlier one: put its folder back, or name another directory to begin anew"
        )


def _told(number: int) -> list[int]:
    """Tell all ranks a number; returns each rank's."""
    every = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(every, torch.tensor([number]))
    return [int(told) for told in every]


def _holder(step: int, steps: list[int], place: int, places: list[int]) -> int:
    """Return the first rank of a place in a unit that has a checkpoint of that step."""
    pairs = zip(steps, places, strict=True)
    return next(rank for rank, pair in enumerate(pairs) if pair == (step, place))
