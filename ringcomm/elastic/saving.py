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
from ringcomm.elastic.gathering import tell
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

    def history(self, place: int, step: int) -> int:
        """Return what the checkpoint says; 0 for one that an older version has written."""
        whole = self.whole if self.whole is not None and self.whole.step <= step else None
        about = whole.about if whole is not None else self._checkpoints.about(step)
        return int(about.get("history", 0))

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
        self._due = NONE  # the step of which a checkpoint is due
        self._seen = NONE  # that of the newest one which any rank has had

    def load(self) -> None:
        """Load the newest whole checkpoint of all ranks' folders, if any has one, and share it.

        The folders may be one, or each on its host's own disk. Shards are all of one step. Raises
        RuntimeError on all ranks where to begin anew would lose work: no checkpoint is whole and
        some are damaged, only some shards have any, or the rank with the newest one has just died.
        """
        epochs = self.changes.epochs
        disk, places = self.disk(), epochs.places
        answer = search([disk], places, epochs.unit_size)
        self._seen = max(self._seen, answer.step)
        if answer.step == NONE:
            for error in filter(None, tell(self._why_not_anew(disk))):
                raise RuntimeError(error)
            _require_none(answer.missing, epochs.unit_size)
            giver = places.index(epochs.me.shard)
        else:
            giver = answer.givers[epochs.me.shard]
            if epochs.rank == giver:
                self.take(disk)
        self.changes.share_state(giver)

    def _why_not_anew(self, disk: Disk) -> str:
        if disk.damage is not None:
            return str(disk.damage)
        if self._seen == NONE:
            return ""
        return (
            f"the rank with the checkpoint of step {self._seen} was lost while it was loaded: "
            "start it again with the others, or name another directory to begin anew"
        )

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

    def note(self) -> None:
        """Note whether a checkpoint of the present step is due: on all ranks, any may be 0 soon."""
        step = self.changes.counters.steps
        self._due = step if self.checkpoints.due(step, time.monotonic()) else NONE

    def save_due(self) -> None:
        """Write the checkpoint that is due, if no other step has come since it was."""
        changes = self.changes
        is_member = not (changes.is_spare or changes.given_up)
        if self._due == changes.counters.steps and is_member:
            self.save()

    def save(self, *, certainly: bool = False) -> None:
        """Write a checkpoint; `certainly`: to its end.

        The first rank does, and in units the first one that holds each shard.
        """
        changes, step = self.changes, self.changes.counters.steps
        epochs, self._due = changes.epochs, NONE
        if epochs.rank != units.replicas_of(epochs.me, epochs.members)[0]:
            return
        if certainly:
            with contextlib.suppress(RuntimeError):  # the one before has failed: it was logged
                self.checkpoints.finish()
        state = {name: thing.state_dict() for name, thing in self._named()}
        assert changes.tracked is not None
        later = {memory_of(part_of(t)) for t in changes.tracked.changed_by_optimizers()}
        about = {
            "run": self._run,
            "epoch": changes.epochs.epoch,
            "history": changes.counters.history,
        }
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
            "the same step and the same training, or of an earlier step: put its folder back, or "
            "name another directory to begin anew"
        )
