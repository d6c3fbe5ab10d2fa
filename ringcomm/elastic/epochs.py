"""The groups of a world, one after another, and the agreements between them.

An epoch has one default process group. When it ends, its members agree on who goes on, destroy the
group and make the next one. Survivors need no store for that; guests come through the store.

The words that go with a decision: `~uuid` for a guest of the next epoch, `+uuid` for a guest that
becomes a member, `@host:port` for the store from now on.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringcomm._runtime.backend import backend_of
from ringcomm._runtime.options import Options
from ringcomm.elastic import units
from ringcomm.elastic.agreement import NOTHING, Agreement, Decision, Witness
from ringcomm.elastic.errors import Evicted, Spare, TooFew
from ringcomm.elastic.kept_groups import KeptGroups, Meeting
from ringcomm.elastic.process import Process
from ringcomm.elastic.pulse import Guard, Pulse, Pulses, heard
from ringcomm.elastic.rendezvous import Admission, Record
from ringcomm.elastic.store import RunStore, within
from ringcomm.elastic.unit_groups import UnitGroups

FOUNDERS_SECONDS = 10.0  # for the first group: all of them were there a moment ago
BROKEN = "waits for its unit"  # the fate of a member whose unit has lost a rank
GUESTS_SECONDS = 5.0  # for a group with guests: they answered a moment ago


@dataclass(frozen=True)
class Settings:
    """The user's settings for groups. Times are seconds."""

    timeout: float  # for operations
    patience: float  # with the network, and with members that are too few
    options: Options  # for the groups
    witness: bool = True
    guests: float = GUESTS_SECONDS  # for a group with guests


@dataclass(frozen=True)
class Decided:
    """The decision of an agreement, as this rank sees it."""

    step: int
    lost: tuple[Process, ...]
    extra: str
    seconds: float
    fates: dict[str, str] = field(default_factory=dict)  # of members that are gone, by uuid


@dataclass
class Epochs:
    """The present epoch of one process, and how it comes to the next one."""

    run: str
    home: RunStore
    life: int  # the run's: whether a world before this one has ended
    me: Process
    settings: Settings
    groups: UnitGroups | None = None  # of units, if the world has any
    wants_copies: bool = False  # of each shard, while there is one unit
    epoch: int = 0
    members: tuple[Process, ...] = ()
    guests: tuple[Process, ...] = ()
    agreement: Any = None  # an Agreement, from the first group on
    made: Decision = NOTHING  # the last decision, for a guest
    pulse: Pulse | None = None  # of this process, while it is a guest
    pulses: Pulses | None = None  # of the guests, on rank 0
    guard: Guard | None = None  # of the guests
    kept: KeptGroups = field(default_factory=KeptGroups)
    _meeting: Meeting | None = None  # a guest has had none yet

    @property
    def store(self) -> Any:
        """The keys of this world. Raises dist.DistStoreError where its store is not reached."""
        return self._of_life(self.home.keys)

    def _of_life(self, keys: Any) -> Any:
        return keys if self.life == 0 else dist.PrefixStore(f"life/{self.life}", keys)

    @property
    def all(self) -> tuple[Process, ...]:
        """The ranks of the group: members, then guests."""
        return self.members + self.guests

    @property
    def places(self) -> list[int]:
        """The numbers of the shards that the members hold, by rank."""
        return [process.shard for process in self.members]

    @property
    def members_by_place(self) -> list[Process]:
        """The members of a world of one unit, by their places in it."""
        return sorted(self.members, key=lambda process: process.shard)

    @property
    def unit_size(self) -> int:
        return self.groups.size if self.groups else 1

    @property
    def is_broken(self) -> bool:
        """Whether no unit is whole: then the members are what is left of the last one."""
        return units.are_broken(self.members, self.unit_size)

    @property
    def is_last_unit(self) -> bool:
        """Whether the members are a whole unit, and there is no other one."""
        return 1 < self.unit_size == len(self.members) and not self.is_broken

    @property
    def keeps_copies(self) -> bool:
        """Whether shards are copied while there is one unit: all ranks want it, or none does it."""
        return self.wants_copies and (self._meeting is None or self._meeting.copies)

    @property
    def rank(self) -> int:
        return [process.uuid for process in self.all].index(self.me.uuid)

    def start(self, members: tuple[Process, ...]) -> None:
        """Make the first group of a world. Raises what the making of a group raises."""
        self.members = members
        self._make(FOUNDERS_SECONDS)
        dist.barrier()
        if self.groups is not None:
            self.groups.begin(self.me, members)
        self.agreement = Agreement(f"{self.run}/{self.life}", self.backend(), 0)
        self._meet()

    def enter(self, admission: Admission) -> None:
        """Make the group in which this process is a guest."""
        self.epoch, self.members = admission.epoch, admission.members
        self.guests = admission.guests
        self.made = Decision(admission.ranks, admission.step, admission.extra)
        self._make(self.settings.guests)
        self.agreement = Agreement(
            f"{self.run}/{self.life}", self.backend(), self.epoch, len(self.guests), self.made
        )

    def meet_guests(self) -> None:
        """Learn who the guests are. Raises dist.DistStoreError where the store does not say."""
        keys = [f"guest/{guest.uuid}" for guest in self.guests]
        if keys:
            cards = within(lambda: [self.store.get(key).decode() for key in keys])
            self.guests = tuple(Process(**json.loads(card)) for card in cards)

    def make(self) -> None:
        """Make the group of the present epoch. Raises RuntimeError if a member of it is gone."""
        self._make(self.settings.guests if self.guests else self.settings.patience)
        self.agreement.adopt(self.backend())
        self._check_guests()

    def watch_guests(self, failures: Callable[[Process], int]) -> None:
        """Have the guests given up if they give no signs of life; `failures` are those so far."""
        keys, name = self.home.keys, f"{self.life}/{self.epoch}"
        if self.rank == 0:
            guests = [(guest, failures(guest)) for guest in self.guests]
            self.pulses = Pulses(keys, name, guests)
            self.guard = Guard(self.pulses.fault, self._fail)
        else:
            self.guard = Guard(lambda: heard(keys, name), self._fail)

    def watch_no_guests(self) -> None:
        if self.guard is not None:
            self.guard.end()
            self.guard = self.pulses = None

    def _check_guests(self) -> None:
        if self.guard is not None:
            self.guard.check()

    def _fail(self) -> None:
        """Have operations of the present group fail, if it is made: any thread may do it."""
        with contextlib.suppress(ValueError, RuntimeError):
            self.backend().abort()

    def connect_groups(self) -> None:
        """Connect the groups of the program and of units, where all ranks are members.

        Raises what `make` raises.
        """
        self._meet()
        self.connect_units()

    def _meet(self) -> None:
        seconds, check = self.settings.patience, self.agreement.check_members
        self._meeting = self.kept.meet(
            self._number, self.members, check, seconds, self.wants_copies
        )

    def connect_units(self) -> None:
        """Connect the groups of units, once an epoch. Raises what `make` raises."""
        if self.groups is not None:
            assert self._meeting is not None
            self.groups.connect(self._number, self.me, self.members, self._meeting)

    @property
    def _number(self) -> int:
        return self.life << 32 | self.epoch

    def agree(self, decided: int, voted: bool, extra: str, failed: bool) -> Decided:
        """End the group's operations, and agree on the next epoch, the present one afterwards.

        The group itself stays until the next one is made: the program may ask for its rank. Members
        of broken units leave, and the others agree once more.

        `failed`: an operation has waited for a rank for too long. Raises Evicted, for such members
        Spare, and TooFew where no unit is whole. But if the last one has copies of its shards, all
        that are left of it stay.
        """
        size = self.unit_size
        waits = self.keeps_copies and len(self.members) <= size
        answer = self._agree(decided, voted, extra, failed)
        while True:
            stay, spare = units.arrange(self.members, size)
            if spare and waits and not stay:
                return answer
            if spare:
                self._leave_broken_unit(stay, spare)
                again = self._agree(answer.step, False, "", failed=False)
                answer = Decided(
                    again.step,
                    answer.lost + again.lost,
                    answer.extra,
                    answer.seconds + again.seconds,
                    again.fates | answer.fates | {process.uuid: BROKEN for process in spare},
                )
                continue
            self.members = stay
            self.me = next(process for process in self.all if process.uuid == self.me.uuid)
            return answer

    def _leave_broken_unit(self, stay: tuple[Process, ...], spare: tuple[Process, ...]) -> None:
        if stay and self.me.uuid not in [process.uuid for process in spare]:
            return
        self.agreement.leave()
        self._destroy()
        if stay:
            raise Spare
        raise self.too_few(spare)

    def too_few(self, left: tuple[Process, ...]) -> TooFew:
        """Return the error of a world in which some shard has no holder left."""
        held = ", ".join(str(place) for place in sorted({process.place for process in left}))
        return TooFew(
            f"no unit of {self.unit_size} ranks is whole: the ranks that are left hold only shard "
            f"{held}; start them again, they go on from the checkpoint"
        )

    def _agree(self, decided: int, voted: bool, extra: str, failed: bool) -> Decided:
        units_own = (self.groups.unit, self.groups.replicas) if self.groups else ()
        self.kept.note(self.all, units_own)
        self._abort()
        patience = 2 * self.settings.patience if failed else self.settings.timeout
        began = time.monotonic()
        keys = self.home.ready if self.settings.witness else None
        try:
            answer = self.agreement.agree(
                decided,
                voted,
                extra,
                Witness(self._of_life(keys), f"witness/{self.epoch + 1}") if keys else None,
                patience,
                2 * self.settings.patience,
            )
        except dist.DistBackendError as error:
            self._destroy()
            raise Evicted(str(error)) from None
        self._shut_down()
        if not answer.stays:
            self._destroy()
            raise Evicted(
                f"this rank was given up by the others in epoch {self.epoch}: it must not go on; "
                "start it anew to join"
            )
        self.made = answer.decision
        stay = tuple(self.members[rank] for rank in self.made.ranks)
        fates = {self.members[rank].uuid: fate for rank, fate in self.agreement.fates.items()}
        lost = tuple(member for member in self.members if member not in stay)
        words = self.made.extra.split()
        confirmed = tuple(guest for guest in self.guests if "+" + guest.uuid in words)
        lost += tuple(guest for guest in self.guests if guest not in confirmed)
        self.members, self.epoch = stay + confirmed, answer.epoch
        self.guests = tuple(
            Process(word[1:], "unknown", 0) for word in words if word.startswith("~")
        )
        for word in words:
            if word.startswith("@"):
                self.home.move(word[1:])
        seconds = time.monotonic() - began
        return Decided(self.made.step, lost, self.made.extra, seconds, fates)

    def _shut_down(self) -> None:
        """Wait for what streams of a device still do for the groups: it writes into tensors.

        Not for the members of other hosts: the dead take nothing, and this process goes on.
        """
        self._for_all_groups("_close")

    def _destroy(self, *, keeping: bool = False) -> None:
        self.kept.take_out() if keeping else self.kept.forget()
        if self.groups is not None:
            self.groups.take_out()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _abort(self) -> None:
        """End the operations of all groups: no rank is to wait for this one in any of them."""
        self._for_all_groups("abort")

    def _for_all_groups(self, what: str) -> list[Any]:
        """Call `what` of each group's backend; return the results."""
        results = []
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):  # a group of another backend
                if function := getattr(backend_of(group), what, None):
                    results.append(function())
        return results

    def issued(self) -> list[int]:
        """Return how many collectives this rank has called so far, by group."""
        return self._for_all_groups("_get_sequence_number_for_group")

    def has_timed_out(self) -> bool:
        """Tell whether an operation of any group has waited for a rank for too long."""
        return any(str(error).endswith(".TIMEOUT") for error in self._for_all_groups("get_error"))

    def has_lost(self) -> bool:
        """Tell whether a member of the present epoch has died, or is suspected."""
        return self.agreement is not None and bool(self.agreement.lost())

    def check_groups(self) -> None:
        """Raise DistBackendError if any group has failed, also where the program hid its error."""
        for error in self._for_all_groups("get_error"):
            if not str(error).endswith(".SUCCESS"):
                raise dist.DistBackendError("an operation of this step has failed")

    def end(self) -> None:
        """Leave for good: the others need not wait for the end of this process."""
        if self.agreement is not None:
            self.agreement.leave()
        if self.pulse is not None:
            self.pulse.end()
        self._destroy()

    def backend(self) -> Any:
        return backend_of()

    def record(self) -> Record:
        """Return this world as the store is to know it."""
        return Record(self.life, self.epoch, True, self.all, unit=self.unit_size)

    def is_left(self, keys: Any) -> bool:
        """Tell whether the world goes on without this process, as the store has it."""
        if not keys.check(["world"]):
            return False
        record = Record.from_text(keys.get("world").decode())
        later = record.life == self.life and record.epoch > self.epoch
        return later and all(process.uuid != self.me.uuid for process in record.members)

    def admission(self) -> Admission:
        """Return all that the guests of the present epoch need to know."""
        ranks, step, extra = self.made
        who = (self.members, self.guests)
        return Admission(self.life, self.epoch, *who, tuple(ranks), step, extra)

    def _make(self, seconds: float) -> None:
        self._destroy(keeping=True)
        options = copy.copy(self.settings.options)
        if self.agreement is not None:
            self.agreement.prepare(options, self.guests, self._check_guests)
        # The name of a group is in its keys. It counts what this process has tried to make, and
        # others have tried less often.
        dist.distributed_c10d._world.group_count = 0
        try:
            keys = self.store
        except dist.DistStoreError:
            if self.agreement is None or self.guests:
                raise
            keys = dist.HashStore()  # this group needs none
        dist.init_process_group(
            "ringcomm",
            store=dist.PrefixStore(f"epoch/{self.epoch}", keys),
            rank=self.rank,
            world_size=len(self.all),
            timeout=timedelta(seconds=seconds),
            pg_options=options,
        )
        self.backend()._set_default_timeout(timedelta(seconds=self.settings.timeout))
