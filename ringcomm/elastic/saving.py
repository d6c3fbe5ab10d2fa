"""When a world writes its checkpoints, and which of those on all ranks' disks it goes on from."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from ringcomm._runtime.process import say
from ringcomm.elastic import ddp, transfer, units
from ringcomm.elastic.changes import COUNTERS, Changes
from ringcomm.elastic.checkpoint import Checkpoints, Found
from ringcomm.elastic.newest import NONE, search
from ringcomm.elastic.shards import part_of
from ringcomm.elastic.snapshot import memory_of


class Disk:
    """The checkpoints in one rank's folder, as a source of the shard at its place."""

    def __init__(self, checkpoints: Checkpoints, place: int) -> None:
        self._checkpoints, self._place = checkpoints, place
        self.whole: Found | None = None  # the newest one that `check` has read
        self.damage: RuntimeError | None = None  # none is whole

    def latest(self, place: int, most: int | None) -> int:
        """Return the step of the newest checkpoint, whose files are read by `check` alone."""
        if place != self._place or self.damage is not None:
            return NONE
        if self.whole is not None and (most is None or self.whole.step <= most):
            return self.whole.step
        return self._checkpoints.latest_step(most)

    def check(self, place: int, step: int) -> None:
        """Read all bytes of the newest checkpoint up to `step`; else of the one before it."""
        try:
            self.whole = self._checkpoints.newest(step)
        except RuntimeError as error:
            self.whole, self.damage = None, error


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
        epochs = self.changes.epochs
        disk, places = self.disk(), epochs.places
        answer = search([disk], places, epochs.unit_size)
        if answer.step == NONE and disk.damage is not None:
            raise disk.damage
        if answer.step == NONE:
            _require_none(answer.missing, epochs.unit_size)
            giver = places.index(epochs.me.shard)
        else:
            giver = answer.givers[epochs.me.shard]
            if epochs.rank == giver:
                self.take(disk)
        self.changes.share_state(giver)

    def disk(self) -> Disk:
        """Return this rank's checkpoints as a source."""
        return Disk(self.checkpoints, self.changes.epochs.me.shard)

    def take(self, disk: Disk) -> None:
        """Load the checkpoint that `Disk.check` has read."""
        newest = disk.whole
        assert newest is not None
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


def _require_none(missing: list[int], unit: int) -> None:
    """Raise RuntimeError if any shard has a checkpoint: to begin anew would lose the work."""
    if len(missing) < unit:
        raise RuntimeError(
            f"there are checkpoints, but of shard {', '.join(map(str, missing))} there is none of "
            "the same step or an earlier one: put its folder back, or name another directory to "
            "begin anew"
        )
