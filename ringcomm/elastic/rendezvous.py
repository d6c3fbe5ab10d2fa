"""Where processes meet that are in no world yet: keys of the store, as a rendezvous.

The first ones found a world together. Others ask to be admitted, and the world's rank 0 calls them
when it is ready. A call has a number of its own, and only those that answer it are chosen. So one
that has died meanwhile is never waited for.

What is founded is a record, written by compare-and-set: of several founders one wins. A world whose
members are all known to be dead is founded anew, as its next life.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringcomm._runtime.process import say
from ringcomm.elastic import lease, units
from ringcomm.elastic.errors import Evicted, Over
from ringcomm.elastic.job import Job
from ringcomm.elastic.lease import Lapse
from ringcomm.elastic.process import Process

LOOK_SECONDS = 0.005  # between looks at the store of one that waits
ANSWER_SECONDS = 0.03  # for an answer to a call, or for the next one
JOIN_SECONDS = 0.015  # the same, of guests: one that is late answers the next call
ANSWER_TRIPS = 20  # and so many round trips to the store: that may be far
LONGEST_SECONDS = 4.0  # for answers to the calls of a founder: others may be far from the store
ALONE_SECONDS = 1.0  # before one founds a world alone: a world without a store may find this one
PRESENT_SECONDS = 10.0  # for the founders of a world, who answered a moment ago
MEETING_SECONDS = 60.0  # of founders, who give one another up sooner unless all of them died
FOUNDER_SECONDS = 2.0  # without a call: then another one founds
ASK_SECONDS = 1.0  # then one that waits asks again
FOLLOW_SECONDS = 10.0  # then one that waits tries again to reach a store that is elsewhere
TELL_SECONDS = 10.0
OVER_SECONDS = 10.0  # that one waits for others where a world has ended
BELL_WAITS = timedelta(days=20)  # torch has it as milliseconds in 31 bits


@dataclass(frozen=True)
class Record:
    """The store's record of a world. Members that died since may still be in it."""

    life: int = 0
    epoch: int = 0
    confirmed: bool = False  # its first members have met
    members: tuple[Process, ...] = ()
    store: str = ""  # where the world's store is now; "": it is this one
    unit: int = 1  # how many ranks hold a copy of the model together

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Record:
        fields = json.loads(text)
        members = tuple(Process(**member) for member in fields.pop("members"))
        return cls(**fields, members=members)

    def place_of(self, process: Process) -> int | None:
        uuids = [member.uuid for member in self.members]
        return uuids.index(process.uuid) if process.uuid in uuids else None


@dataclass(frozen=True)
class Admission:
    """How a guest enters: the epoch, its members and guests, and the decision that made it."""

    life: int
    epoch: int
    members: tuple[Process, ...]
    guests: tuple[Process, ...]
    ranks: tuple[int, ...]  # the members', in the epoch before
    step: int
    extra: str

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Admission:
        fields = json.loads(text)
        for name in ("members", "guests"):
            fields[name] = tuple(Process(**process) for process in fields[name])
        fields["ranks"] = tuple(fields["ranks"])
        return cls(**fields)


@dataclass
class Rendezvous:
    """One process's side of the rendezvous. `store` holds the keys of one run."""

    store: Any  # dist.Store
    me: Process
    moved: Callable[[str], Any] | None = None  # returns the keys at another address, or raises
    start: int = 1  # processes that found a world
    lapse: Lapse = field(default_factory=lambda: Lapse(None))
    job: Job | None = None  # where no name tells one from another
    unit: int = 1  # how many ranks hold a copy of the model together
    last_call: str = ""
    known: Record | None = None
    heard: float = field(default_factory=time.monotonic)  # the last call, or news of the world
    window: float = ANSWER_SECONDS  # for answers to the next call
    follows_at: float = 0.0  # when it next tries to reach the world's store, which is elsewhere
    meeting: tuple[Record | None, float] = (None, 0.0)  # founders that meet, and since when

    # ---- the record

    def record(self) -> Record | None:
        """Return what the store knows of the world, or None where there was none yet."""
        if not self.store.check(["world"]):
            return None
        return Record.from_text(self.store.get("world").decode())

    def replace(self, old: Record | None, new: Record) -> bool:
        """Write `new`, if the record is still `old`. Returns whether it is the record now."""
        text = new.to_text()
        now = self.store.compare_set("world", old.to_text() if old else "", text)
        return bool(now.decode() == text)

    def bring_up_to_date(self, new: Record) -> bool:
        """Write a world's present record over an older one; False if its life is over."""
        while (record := self.record()) is not None and record.life == new.life:
            if record.epoch >= new.epoch or self.replace(record, new):
                return True
        return False

    # ---- those that wait

    def enter(self, timeout: float) -> Record | None:
        """Wait until this process is one of a world's founders, or until a world runs.

        Returns the record of the world to be made, or None where one runs already: then `ask`.
        Raises TimeoutError.
        """
        return self._wait(timeout, lambda: self._runs())

    def ask(self, timeout: float, *, founds: bool = True) -> Record | Admission:
        """Wait to be admitted. Returns how to enter, or the record of a world to be made.

        Raises TimeoutError. One that founds none raises Evicted where no world is left.
        """
        began = time.monotonic()
        self.store.check(["world"])
        self.me = replace(self.me, ready=True, trip=time.monotonic() - began)
        return self._ask(timeout, "welcome", Admission.from_text, founds=founds)

    def ask_for_place(self, timeout: float) -> Record | None:
        """Wait for a place in a unit, of which the model will hold a shard.

        Returns None, and `me` has it, or the record of a world to be made. Raises TimeoutError.
        """
        self.me = replace(self.me, place=-1, ready=False)
        answer = self._ask(timeout, "place", int)
        if isinstance(answer, Record):
            return answer
        self.me = replace(self.me, place=answer)
        return None

    def _ask(
        self, timeout: float, what: str, read: Callable[[str], Any], *, founds: bool = True
    ) -> Any:
        asked = [0.0]

        def answer() -> Any:
            if time.monotonic() - asked[0] > ASK_SECONDS:
                ask(self.store)
                asked[0] = time.monotonic()
            key = f"{what}/{self.me.uuid}"
            return read(self.store.get(key).decode()) if self.store.check([key]) else None

        return self._wait(timeout, answer, ("found", "join") if founds else ("join",))

    def _runs(self) -> str | None:
        record = self.known
        runs = record is not None and record.confirmed and not self._are_dead(record)
        return "runs" if runs else None

    def _wait(self, timeout: float, ready: Any, kinds: tuple[str, ...] = ("found",)) -> Any:
        began = told = time.monotonic()
        while True:
            self.known = self.record()
            if self._follows():
                continue
            if self.known and not self.known.confirmed and self.known.place_of(self.me) is not None:
                self._check_unit()
                return self.known
            self._check_unit()
            if (result := ready()) is not None:
                return None if result == "runs" else result
            self._answer(kinds)
            self._look_at_the_lease()
            self._look_at_founders()
            if "found" not in kinds:
                self._check_world()
            elif self._may_found():
                self._found(began + timeout - time.monotonic())
            now = time.monotonic()
            if now - began > OVER_SECONDS and self._is_over():
                raise Over
            if now - began > timeout:
                raise TimeoutError(self._late(now - began))
            if now - told > TELL_SECONDS:
                told = now
                say(f"elastic: {self._late(now - began)}")
            time.sleep(LOOK_SECONDS)

    def _follows(self) -> bool:
        """Go to the world's store if it is elsewhere now; tell whether it is, and answers.

        If it is lost, as where the world is, too, this process waits here for the lease to lapse.
        """
        record, now = self.known, time.monotonic()
        if not self.moved or not record or not record.store or now < self.follows_at:
            return False
        if self._are_dead(record):
            return False
        try:
            self.store = self.moved(record.store)
        except dist.DistStoreError as error:
            self.follows_at = now + FOLLOW_SECONDS
            say(f"elastic: the world's store is not reached: {error}")
            return False
        return True

    def _check_unit(self) -> None:
        record = self.known
        if record is None or not record.members or record.unit == self.unit:
            return
        if not self._are_dead(record):
            raise ValueError(
                f"unit={record.unit} at the ranks of this world and {self.unit} here: give every "
                "rank's elastic.join the same"
            )

    def _check_world(self) -> None:
        """Raise Evicted if the world is lost, unless it has come to its end."""
        if self.known and self._are_dead(self.known) and not self._is_over():
            raise Evicted(
                "this rank waited for its unit to be whole, and meanwhile the rest of the world "
                "was lost; start it again, and the next world goes on from the checkpoint"
            )

    def _look_at_the_lease(self) -> None:
        record = self.known
        if record is None or not record.confirmed or not self.lapse.is_due():
            return
        if not self._are_dead(record) and self.lapse.look(self.store, record.life, record.members):
            say(
                f"elastic: nothing was heard of the world of {len(record.members)} ranks for so "
                "long that it is taken to be lost: those that wait may found another one"
            )

    def _look_at_founders(self) -> None:
        """Give up those that have met for too long: they may be dead on a host that is not seen."""
        record, now = self.known, time.monotonic()
        if record is None or record.confirmed or not record.members:
            return
        if self.meeting[0] != record:
            self.meeting = (record, now)
        elif now - self.meeting[1] > MEETING_SECONDS:
            self.void(record)

    def _is_over(self) -> bool:
        """Tell whether the world has come to its end, and none is being founded."""
        record = self.known
        if record is None or not record.confirmed or not self._are_dead(record):
            return False
        return lease.have_ended(self.store, record.members)

    def _late(self, seconds: float) -> str:
        if self.unit > 1 and self.me.ready and self.known and not self._are_dead(self.known):
            return (
                f"waited {seconds:.0f} s for others to complete a unit of {self.unit} ranks with "
                f"this one, which holds shard {self.me.place}: start as many as have ended"
            )
        if self.known and self.known.members and self.known.confirmed:
            return (
                f"waited {seconds:.0f} s to be admitted to a world of "
                f"{len(self.known.members)} ranks, the first of them process "
                f"{self.known.members[0].pid} on {self.known.members[0].host}: if they are all "
                "dead, wait longer than the lease (`timeout` and `lease` of join), or start under "
                "another name, RINGCOMM_ELASTIC_RUN"
            )
        return f"waited {seconds:.0f} s for {self.start} ranks to found a world: are all started?"

    def _answer(self, kinds: tuple[str, ...]) -> None:
        if not self.store.check(["call"]):
            return
        call = json.loads(self.store.get("call").decode())
        if call["name"] == self.last_call:
            return
        self.last_call = call["name"]
        self.heard = time.monotonic()
        if call["kind"] in kinds:
            answer(self.store, call["name"], self.me)

    # ---- founding

    def _are_dead(self, record: Record) -> bool:
        """Tell whether all members of the record are known to be dead, by any that wait here."""
        return lease.are_gone(self.store, record.members)

    def _may_found(self) -> bool:
        record = self.known
        if record and record.members and not self._are_dead(record):
            return False  # it runs, or its founders are meeting
        founder = self.store.compare_set("founder", "", self.me.uuid).decode()
        quiet = time.monotonic() - self.heard > FOUNDER_SECONDS
        if founder != self.me.uuid and quiet:
            self.heard = time.monotonic()
            founder = self.store.compare_set("founder", founder, self.me.uuid).decode()
        return bool(founder == self.me.uuid)

    def _found(self, left: float) -> None:
        """Call the others, for so many seconds at most, and found a world if enough answer."""
        self.last_call = call(self.store, "found")
        self.heard = time.monotonic()
        answer(self.store, self.last_call, self.me)
        came = answers(self.store, self.last_call, self.start, min(left, self.window))
        if self.known is None and self.start == 1:
            time.sleep(ALONE_SECONDS)
        if len(came) < self.start:
            self.window = min(2 * self.window, LONGEST_SECONDS)
            return
        if self.known and not self._are_dead(self.known):
            return  # it runs after all
        life = self.known.life + 1 if self.known else 0
        members = units.in_units(in_order(came)[: self.start], self.unit)
        founded = Record(life=life, members=members, unit=self.unit)
        if not self.replace(self.known, founded):
            return
        if self.job is not None:
            self.store.set(f"job/{life}", self.job.to_text())
        if self.known:
            lease.succeed(self.store, self.known.life)

    def check_job(self) -> None:
        """Raise ValueError if the world that runs is another job's."""
        key = f"job/{self.known.life if self.known else 0}"
        if self.job is not None and self.store.check([key]):
            self.job.check(Job.from_text(self.store.get(key).decode()))

    def assemble(self, record: Record) -> bool:
        """Wait for the others, as one of the founders; tell whether all are there.

        To make a group with one that has died since it answered would take a timeout.
        """
        self.store.set(f"present/{record.life}/{self.me.uuid}", "1")
        deadline = time.monotonic() + PRESENT_SECONDS
        while self.record() == record:
            keys = {f"present/{record.life}/{process.uuid}": process for process in record.members}
            if self.store.check(list(keys)):
                return True
            dead = [process for key, process in keys.items() if process.is_dead()]
            if dead or time.monotonic() > deadline:
                self.void(record)
            time.sleep(LOOK_SECONDS)
        now = self.record()  # the first of them may be ahead
        return now is not None and (now.life, now.confirmed) == (record.life, True)

    def is_confirmed(self, record: Record) -> bool:
        """Wait until the first founder says that all have met. Whether it has, before it died."""
        deadline = time.monotonic() + PRESENT_SECONDS
        while (now := self.record()) == record:
            if record.members[0].is_dead() or time.monotonic() > deadline:
                self.void(record)
            time.sleep(0.001)
        return now is not None and (now.life, now.confirmed) == (record.life, True)

    def void(self, record: Record) -> None:
        """Give up a world whose founders could not meet: they found another one."""
        self.replace(record, replace(record, members=()))


def ask(store: Any) -> None:
    """Say that a process waits to be called."""
    store.set("asks", "1")


def await_asks(store: Any) -> None:
    """Return when a process waits to be called, or after weeks, without requests meanwhile."""
    with contextlib.suppress(dist.DistStoreError):
        store.wait(["asks"], BELL_WAITS)


def call(store: Any, kind: str) -> str:
    """Call those that wait: "found" or "join". Returns the call's name."""
    name = f"call/{store.add('calls', 1)}"
    store.set("call", json.dumps({"name": name, "kind": kind}))
    return name


def answer(store: Any, name: str, me: Process) -> None:
    """Say that this process is there, and ready."""
    place = store.add(f"{name}/count", 1)
    store.set(f"{name}/{place}", json.dumps(asdict(me)))


def answers(store: Any, name: str, enough: int, seconds: float = ANSWER_SECONDS) -> list[Process]:
    """Return those that answer the call: the first `enough`, or until `seconds` bring no more."""
    began = time.monotonic()
    store.check([name])
    pause = seconds + ANSWER_TRIPS * (time.monotonic() - began)
    came: list[Process] = []
    last = began
    while len(came) < enough and time.monotonic() < min(last + pause, began + PRESENT_SECONDS):
        key = f"{name}/{len(came) + 1}"
        if store.check([key]):
            came.append(Process(**json.loads(store.get(key).decode())))
            last = time.monotonic()
        else:
            time.sleep(LOOK_SECONDS)
    return came


def in_order(processes: list[Process]) -> list[Process]:
    """Sort by the ranks that their launcher gave them, where each has another one."""
    ranks = [process.rank for process in processes]
    if len(set(ranks)) == len(ranks) and min(ranks, default=-1) >= 0:
        return sorted(processes, key=lambda process: process.rank)
    return processes
