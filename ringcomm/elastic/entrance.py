"""How a process comes into a world: as one of its founders, or as a guest of one that runs."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcomm._runtime.library import load_library
from ringcomm._runtime.process import say
from ringcomm.elastic import lease
from ringcomm.elastic.epochs import Epochs, Settings
from ringcomm.elastic.job import Job
from ringcomm.elastic.lease import Lapse
from ringcomm.elastic.rendezvous import Admission, Process, Record, Rendezvous
from ringcomm.elastic.store import RunStore


class Entered(NamedTuple):
    """A world that this process has entered; `is_guest`: it lacks the state, and a vote."""

    epochs: Epochs
    is_guest: bool


class Entrance:
    """The way into the world of one run, for one process."""

    def __init__(
        self,
        run: str,
        store: RunStore,
        settings: Settings,
        start: int,
        lapse: Lapse,
        job: Job | None,
    ) -> None:
        """`job` is this process's, unless the run has a name."""
        self._run, self._store, self._settings = run, store, settings
        me = Process.this(load_library().card())
        self._rendezvous = Rendezvous(store.keys, me, self._go_to, start, lapse, job)

    def enter(self, timeout: float) -> Entered | None:
        """Found a world with others; None where one runs, then this process is apart until `ask`.

        Raises TimeoutError after so many seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            record = self._rendezvous.enter(deadline - time.monotonic())
            if record is None:
                self._rendezvous.check_job()
                say(f"elastic: a world runs: process {os.getpid()} is admitted at world.track()")
                self._stay_apart()
                return None
            if entered := self._found(record):
                return entered
            self.rename()

    def ask(self, timeout: float) -> Entered | None:
        """Be admitted, or found a world where the one that ran is lost; None: ask once more.

        Raises TimeoutError after so many seconds.
        """
        answer = self._rendezvous.ask(timeout)
        dist.destroy_process_group()
        entered = self._visit(answer) if isinstance(answer, Admission) else self._found(answer)
        if entered is None:
            self.refused()
        return entered

    def refused(self) -> None:
        """Be apart again, under another name."""
        with contextlib.suppress(RuntimeError):  # of the store
            lease.tell_end(self._store.keys, self._rendezvous.me, well=False)
        self.rename()
        self._stay_apart()

    def _go_to(self, address: str) -> Any:
        say(f"elastic: the store of the world is served at {address} now")
        self._store.move(address)
        return self._store.keys

    def rename(self) -> None:
        self._rendezvous.me = replace(self._rendezvous.me, uuid=Process.this("").uuid)

    def _stay_apart(self) -> None:
        """Have a group of one: models can be made, as by DDP, and the world need not wait."""
        dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)

    def _epochs(self, life: int) -> Epochs:
        return Epochs(self._run, self._store, life, self._rendezvous.me, self._settings)

    def _visit(self, admission: Admission) -> Entered | None:
        epochs = self._epochs(admission.life)
        try:
            epochs.enter(admission)
        except dist.DistBackendError as error:
            say(f"elastic: process {os.getpid()} was not admitted, and asks again: {error}")
            epochs.end()
            return None
        return Entered(epochs, True)

    def _found(self, record: Record) -> Entered | None:
        rendezvous, epochs = self._rendezvous, self._epochs(record.life)
        if not rendezvous.assemble(record):
            return None
        try:
            epochs.start(record.members)
        except (dist.DistBackendError, dist.DistNetworkError) as error:
            say(f"elastic: a world of {len(record.members)} ranks was not founded: {error}")
            epochs.end()
            rendezvous.void(record)
            return None
        if epochs.rank == 0:
            rendezvous.replace(record, replace(record, confirmed=True))
        if rendezvous.is_confirmed(record):
            return Entered(epochs, False)
        epochs.end()  # another member could not meet, and has given this world up
        return None
