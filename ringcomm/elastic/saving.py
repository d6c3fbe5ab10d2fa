"""The checkpoints of a world: rank 0 writes them, and a new world loads the newest."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from ringcomm.elastic import admission, ddp
from ringcomm.elastic.changes import COUNTERS, Changes
from ringcomm.elastic.checkpoint import Checkpoints
from ringcomm.elastic.log import log


class Saving:
    """What a world does with `Checkpoints`. They hold the plain modules' state, without DDP's."""

    def __init__(self, run: str, checkpoints: Checkpoints, changes: Changes) -> None:
        self._run, self._checkpoints, self._changes = run, checkpoints, changes

    def load(self) -> None:
        """Load the newest whole checkpoint on rank 0, if there is one, and share the state."""
        changes = self._changes
        if changes.epochs.rank == 0 and (found := self._checkpoints.newest()):
            state = self._checkpoints.load(found, dict(self._named()))
            for name, thing in self._named():
                thing.load_state_dict(state[name])
            log(f"goes on from checkpoint {found.path}, step {found.step}")
            changes.counters.steps = found.step
        admission.share(changes)

    def save(self, certainly: bool = False) -> None:
        """Write a checkpoint on rank 0 if one is due; `certainly`: in any case, to its end."""
        changes, step = self._changes, self._changes.counters.steps
        due = self._checkpoints.due(step, time.monotonic())  # on all ranks: any may be 0 later
        if changes.epochs.rank != 0 or not (due or certainly):
            return
        if certainly:
            with contextlib.suppress(RuntimeError):  # of the one before: it was logged
                self._checkpoints.finish()
        state = {name: thing.state_dict() for name, thing in self._named()}
        self._checkpoints.save(step, state, {"run": self._run, "epoch": changes.epochs.epoch})
        if certainly:
            self._checkpoints.finish()

    def _named(self) -> list[tuple[str, Any]]:
        tracked = self._changes.tracked
        assert tracked is not None
        return [
            (name, ddp.unwrapped(thing) if isinstance(thing, torch.nn.Module) else thing)
            for name, thing in tracked.objects.items()
            if name != COUNTERS
        ]
