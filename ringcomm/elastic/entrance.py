"""How a process comes into a world: as one of its founders, or as a guest of one that runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcomm._runtime.library import load_library
from ringcomm._runtime.process import say
from ringcomm.elastic import lease
from ringcomm.elastic.copies import are_wanted as copies_are_wanted
from ringcomm.elastic.epochs import Epochs, Settings
from ringcomm.elastic.job import Job
from ringcomm.elastic.lease import Lapse
from ringcomm.elastic.process import Process
from ringcomm.elastic.pulse import Pulse
from ringcomm.elastic.rendezvous import Admission, Record, Rendezvous
from ringcomm.elastic.store import RunStore
from ringcomm.elastic.unit_groups import UnitGroups


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
        groups: UnitGroups | None = None,
    ) -> None:
        """`job` is this process's, unless the run has a name; `groups` are those of units."""
        self._run, self._store, self.settings = run, store, settings
        self._groups, unit = groups, groups.size if groups else 1
        me = Process.this(load_library().card())
        self._rendezvous = Rendezvous(store.keys, me, self._go_to, start, lapse, job, unit)

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
                if self._groups is not None:
                    record = self._rendezvous.ask_for_place(deadline - time.monotonic())
            if record is None:
                self._stay_apart()
                return None
            if entered := self._found(record):
                return entered
            self.rename()

    def ask(self, timeout: float, *, founds: bool = True) -> Entered | None:
        """Be admitted, or found a world where the one that ran is lost; None: ask once more.

        Raises TimeoutError after so many seconds. One that `founds` none, because it is in the
        midst of its training, raises Evicted where no world is left.
        """
        self._rendezvous.store = self._store.keys  # a spare's world may have moved meanwhile
        answer = self._rendezvous.ask(timeout, founds=founds)
        pulse = None
        if isinstance(answer, Admission):
            pulse = Pulse(self._rendezvous.store, self._rendezvous.me.uuid)
        if self._groups is not None:
            self._groups.take_out()
        dist.destroy_process_group()
        entered = self._found(answer) if isinstance(answer, Record) else self._visit(answer, pulse)
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
        """Go to the store of a world. Raises dist.DistStoreError, and stays, if none answers."""
        here = self._store.ready, self._store.address
        self._store.move(address)
        try:
            keys = self._store.keys
        except dist.DistStoreError:
            self._store.move_back(*here)
            raise
        say(f"elastic: the store of the world is served at {address} now")
        return keys

    def rename(self) -> None:
        self._rendezvous.me = replace(self._rendezvous.me, uuid=Process.this("").uuid)

    def _stay_apart(self) -> None:
        """Have a group of one: models can be made, as by DDP, and the world need not wait.

        With units it is one that takes no calls, of a unit's size: models can be sharded.
        """
        if self._groups is None:
            dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
        else:
            self._groups.stay_apart(self._rendezvous.me.place)

    def _epochs(self, life: int, processes: Sequence[Process]) -> Epochs:
        """Make the epochs of this process, which is one of those. Its place in a unit is theirs."""
        rendezvous, rest = self._rendezvous, (self.settings, self._groups)
        uuid = rendezvous.me.uuid
        rendezvous.me = next(process for process in processes if process.uuid == uuid)
        copies = self._groups is not None and copies_are_wanted()
        return Epochs(self._run, self._store, life, rendezvous.me, *rest, copies)

    def _visit(self, admission: Admission, pulse: Pulse | None) -> Entered | None:
        epochs = self._epochs(admission.life, admission.guests)
        epochs.pulse = pulse
        try:
            epochs.enter(admission)
        except dist.DistBackendError as error:
            say(f"elastic: process {os.getpid()} was not admitted, and asks again: {error}")
            epochs.end()
            return None
        return Entered(epochs, True)

    def _found(self, record: Record) -> Entered | None:
        rendezvous, epochs = self._rendezvous, self._epochs(record.life, record.members)
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
