"""Deaths of trainees at chosen places: a fate is (number, phase, step), and kills by SIGKILL.

The trainee of that number dies when it first comes to the phase in that step, or in a later one.
`PHASES` says where each is. Step 0 is for what comes before a process has a world.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ringcomm.elastic import ballot, changes, epochs, rendezvous, transfer

PHASES = {
    "answer": "it answers a call: for founders, or for guests",
    "answered": "and has answered it",
    "found": "it begins to make the first group with the other founders",
    "founded": "and that is made",
    "forward": "in the forward pass",
    "bucket": "in the backward pass, when the first buckets are being reduced",
    "vote": "it holds all gradients, and has not voted",
    "voting": "its ballot is on its way",
    "voted": "the vote has ended, and it has applied nothing",
    "applying": "the optimizer begins",
    "applied": "the optimizer has ended",
    "agree": "it left the group, and does not take part in the agreement",
    "agreeing": "a moment later",
    "agreed": "it knows the decision",
    "make": "it begins to make the next group",
    "making": "a moment later",
    "made": "the group works, and nothing else was done",
    "give": "it has sent the header of the state to the guests, if it is the first giver",
    "given": "it has sent all, and has not voted for them",
    "welcome": "it is welcome as a guest, and has given no sign of life",
    "enter": "it begins to make the group as a guest",
    "entering": "a moment later",
    "entered": "the group with it works, and it has received nothing",
    "receive": "it knows the header of the state, and has received nothing else",
    "received": "it has all of the state, and has not voted",
    "stops": "in the forward pass, it is stopped instead of killed",
    "hangs": "in the forward pass, it sleeps until SIGUSR1 comes; its other threads live",
}
MOMENT = 0.001
STOPPED = "stopped: "  # before a phase at which the process is stopped instead of killed


class Fates:
    """Brings what the plan has in store for this process. `world` is known as soon as it is."""

    def __init__(self, phases: dict[str, int], log: Callable[..., None]) -> None:
        self._phases, self._log = phases, log
        self.world: Any = None
        if unknown := {phase.removeprefix(STOPPED) for phase in phases} - PHASES.keys():
            raise ValueError(f"no phase is named {unknown}")
        if phases:
            self._patch()

    def meet(self, phase: str, later: float = 0.0) -> None:
        """Die here, if that is to be; or so many seconds later."""
        if STOPPED + phase in self._phases:
            phase = STOPPED + phase
        step = self.world.step_number + 1 if self.world is not None else 0
        if step < self._phases.get(phase, 1 << 60):
            return
        del self._phases[phase]
        if later:
            threading.Thread(target=self._die, args=(phase, later), daemon=True).start()
        else:
            self._die(phase, 0.0)

    def _die(self, phase: str, later: float) -> None:
        time.sleep(later)
        self._log("dies", phase=phase)
        if phase == "hangs":
            self._hang()
        else:
            stops = phase == "stops" or phase.startswith(STOPPED)
            os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)

    @staticmethod
    def _hang() -> None:
        awake = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: awake.set())
        awake.wait(1000)

    def _patch(self) -> None:
        """Have the engine's steps come by here."""
        self._around(rendezvous, "answer", "answer", "answered")
        self._around(epochs.Epochs, "start", "found", "founded")
        self._around(rendezvous.Rendezvous, "ask", "", "welcome")
        self._around(epochs.Epochs, "enter", "enter", "entered", "entering")
        self._around(epochs.Epochs, "agree", "agree", "agreed", "agreeing")
        self._around(epochs.Epochs, "make", "make", "made", "making")
        cut, vote = transfer.pieces, ballot.vote

        def pieces(*args: Any) -> Any:
            self.meet("receive" if self._is_guest() else "give")
            return cut(*args)

        def fated_vote(mine: Any, ranks: int) -> Any:
            if self.world._changes.epochs.guests:
                self.meet("received" if self._is_guest() else "given")
                return vote(mine, ranks)
            self.meet("vote")
            if "voting" in self._phases:
                with mock.patch.object(ballot, "gather", self._gather):
                    return vote(mine, ranks)
            ballots = vote(mine, ranks)
            self.meet("voted")
            return ballots

        transfer.pieces = pieces  # type: ignore[assignment]
        changes.vote = fated_vote  # type: ignore[attr-defined]

    def _around(self, place: Any, name: str, before: str, after: str, later: str = "") -> None:
        call = getattr(place, name)

        def patched(*args: Any, **more: Any) -> Any:
            self.meet(before)
            if later:
                self.meet(later, MOMENT)
            result = call(*args, **more)
            self.meet(after)
            return result

        setattr(place, name, patched)

    def _gather(self, every: torch.Tensor, own: torch.Tensor) -> None:
        work = dist.distributed_c10d._get_default_group()._allgather_base(every, own)
        self.meet("voting")
        work.wait()

    def _is_guest(self) -> bool:
        epochs_now = self.world._changes.epochs
        return epochs_now.me in epochs_now.guests

    def of_training(self, model: Any, optimizer: Any) -> None:
        """Have the steps of the training come by here, too; call it after `World.track`."""
        if not self._phases:
            return
        first = next(iter(model.module.parameters()))
        model.module.register_forward_pre_hook(self._hook("forward"))
        model.module.register_forward_pre_hook(self._hook("stops"))
        model.module.register_forward_pre_hook(self._hook("hangs"))
        first.register_hook(self._hook("bucket"))
        optimizer.register_step_pre_hook(self._hook("applying"))
        optimizer.register_step_post_hook(self._hook("applied"))

    def _hook(self, phase: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.meet(phase)

        return hook
