"""A thread that watches the store: who wants to join, and whether the store still answers.

It asks once a second. A second thread, the bell, waits in the store until a process wants to join,
and wakes the first: so a guest is called at once, and no request is made meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ringcomm._runtime.process import say
from ringcomm.elastic import lease, units
from ringcomm.elastic.process import Process
from ringcomm.elastic.rendezvous import (
    JOIN_SECONDS,
    Record,
    Rendezvous,
    answers,
    ask,
    await_asks,
    call,
)
from ringcomm.elastic.store import RunStore, Served, within
from ringcomm.elastic.waiting import Waiting

LOOK_SECONDS = 0.1
CHECK_SECONDS = 1.0  # between requests, to see that the store still answers
END_SECONDS = 1.0  # for a thread that was told to end
SEEK_SECONDS = 0.1  # between looks for another store
LONGEST_SECONDS = 1.0  # for an answer to a call
SERVE_SECONDS = 2.0  # without a store: then this rank serves one
MOST = 8  # guests at once: their names go into the slip of the one that leads
MOST_ANSWERS = 64  # to a call, where only whole units can come
BAR_SECONDS, BAR_GROWS, BAR_LONGEST = 2.0, 4, 600.0  # after a failed entrance, and after the next


def without(guests: list[Process], members: tuple[Process, ...]) -> list[Process]:
    """Return those that are no members yet."""
    known = {member.uuid for member in members}
    return [guest for guest in guests if guest.uuid not in known]


class Bars:
    """The processes whose last entrance failed: each is called again after a while, ever longer.

    An entrance that fails holds all members up. A process that is started anew is known by its host
    and by the rank that its launcher gave it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[tuple[str, int], tuple[float, float]] = {}  # the end, and how long it is
        self._failures: dict[tuple[str, int, str], int] = {}  # of processes that live on
        # The others at its last entrance: all enter together or not at all.
        self._with: dict[tuple[str, int, str], set[tuple[str, int, str]]] = {}

    def bar(self, process: Process, failed: Sequence[Process] = ()) -> float:
        """Bar a process from now on; returns for how many seconds.

        `failed`: all that entered with it, and itself.
        """
        key = (process.host, process.rank)
        _, before = self._until.get(key, (0.0, 0.0))
        seconds = min(BAR_LONGEST, before * BAR_GROWS or BAR_SECONDS)
        self._until[key] = (self._clock() + seconds, seconds)
        life = self._life(process)
        self._failures[life] = self.failures(process) + 1
        self._with[life] = {self._life(other) for other in failed} - {life}
        return seconds

    def pardon(self, came: list[Process]) -> None:
        """Bar those no longer that answer, if one that failed with them does not: it has ended.

        Else one that ends whenever it enters would have others barred for as long as itself.
        """
        alive = {self._life(process) for process in came}
        for process in came:
            if self._with.get(self._life(process), alive) - alive:
                self._forget(process)

    def failures(self, process: Process) -> int:
        """Return how often this very process has failed to enter: started anew, it is another."""
        return self._failures.get(self._life(process), 0)

    @staticmethod
    def _life(process: Process) -> tuple[str, int, str]:
        return process.host, process.pid, process.started

    def forget(self, process: Process) -> None:
        """Begin anew with a process that has entered."""
        self._forget(process)
        self._failures.pop(self._life(process), None)

    def _forget(self, process: Process) -> None:
        self._until.pop((process.host, process.rank), None)
        self._with.pop(self._life(process), None)

    def length(self, process: Process) -> float:
        """Return for how many seconds a process was barred at last; 0.0: it has not failed."""
        return self._until.get((process.host, process.rank), (0.0, 0.0))[1]

    def choose(
        self, came: list[Process], unit: int, most: int, members: Sequence[Process] = ()
    ) -> list[Process]:
        """Choose guests from those that came, in whole units, at most so many.

        They enter together or not at all. So those that failed before come after all others, and
        only a unit of them at a time: else each would fail again with the same one.
        """
        new = [process for process in came if not self.length(process)]
        return units.complete(new, unit, most, members) or units.complete(
            sorted(came, key=self.length), unit, min(most, unit), members
        )

    def barred(self, process: Process) -> bool:
        return self._clock() < self._until.get((process.host, process.rank), (0.0, 0.0))[0]


class Bell(threading.Thread):
    """Waits, over a connection of its own, until a process asks to join."""

    def __init__(self, keys: Any, connection: Any, rung: Callable[[], None]) -> None:
        super().__init__(name="ringcomm elastic bell", daemon=True)
        self.keys, self.connection = keys, connection
        self.rang = self.failed = False
        self._rung = rung
        self.start()

    def run(self) -> None:
        try:
            await_asks(self.connection)
            self.rang = True
        except Exception:  # noqa: BLE001 - whether the store is lost, its next answer shows
            self.failed = True
        self._rung()


class Watch:
    """Looks for processes that ask to join, and for another store when there is none.

    Guests are those that answered the last call; `take` takes them, once. A store that is found
    or served here is `store.offer`, until the members go there.
    """

    def __init__(
        self,
        store: RunStore,
        calls: Callable[[], int],
        leads: Callable[[], Record | None],
        looks: Callable[[], None] = lambda: None,
        ends: Callable[[], None] = lambda: None,
        unit: int = 1,
    ) -> None:
        """Begin to look; `looks` is called each second, on each rank, and `ends` at the end.

        Guests come in whole units of so many.

        `leads` returns what the store should know of the world, or None unless this rank leads one
        that works: then it looks. `calls` returns how many guests may come.
        """
        self._store, self._calls, self._leads, self._looks = store, calls, leads, looks
        self._looked, self._ends = 0.0, ends
        self._lock = threading.Lock()
        self._guests: list[Process] = []
        self.bars = Bars()
        self._unit = unit
        self.waiting = Waiting(unit)
        self._window = JOIN_SECONDS  # for an answer to the next call
        self._bell: Bell | None = None
        self._checked = 0.0
        self._lost_since: float | None = None
        self._sought = 0.0
        self._at_home: Served | None = None  # while the world's store is elsewhere
        self._told = ""
        self.succeeded = False  # another world was founded in the place of this one
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringcomm elastic")
        self._thread.start()

    @property
    def wants_change(self) -> bool:
        """Whether the members are to meet: for guests, or for another store."""
        return bool(self._guests) or self._store.offer is not None

    def take(self) -> list[Process]:
        """Return the guests that answered, and look for others from now on."""
        with self._lock:
            guests, self._guests = self._guests, []
            return guests

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        # Not a daemon: Python may unwind one in the midst of C++. It ends with the main thread.
        while True:
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()
            if self._stopped or not threading.main_thread().is_alive():
                break
            self._look_around()
            record = self._leads()
            if record is None or self._store.offer is not None:
                continue
            try:
                self._look()
            except RuntimeError as error:
                self._note_lost(error)
            try:
                self._seek(record)
            except RuntimeError as error:
                self._tell(f"no other store is found: {error}")
        if self._lost_since is None:
            self._ends()
        self._end_bell()

    def _look_around(self) -> None:
        if time.monotonic() - self._looked < CHECK_SECONDS:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(RuntimeError):  # of the store
            self._looks()

    def _look(self) -> None:
        if self._store.is_lost:  # also before this rank led
            raise dist.DistStoreError(self._store.error)
        keys, bell = self._store.ready, self._bell
        if keys is None:
            return
        new = bell is None or bell.keys is not keys
        asked, failed = bell is not None and bell.rang, bell is not None and bell.failed
        due = new or failed or time.monotonic() - self._checked > CHECK_SECONDS
        if due:
            asked = within(lambda: keys.check(["asks"])) or asked
        if asked and not self._guests and (most := self._calls()):
            within(lambda: self._call(keys, min(most, MOST)))
        elif not due:
            return
        self._checked = time.monotonic()
        if due and (record := self._leads()) is not None:  # those that wait ask it who is alive
            now = record
            within(lambda: Rendezvous(keys, now.members[0]).bring_up_to_date(now))
        if keys is self._store.ready:  # else it answers when it was given up
            self._lost_since = None
        if bell is None or new or failed:
            self._bell = self._new_bell(keys)
        elif asked and bell.rang:
            self._bell = Bell(keys, bell.connection, self._wake.set)

    def _new_bell(self, keys: Any) -> Bell | None:
        """None where the store cannot be connected to twice: then it is asked more often."""
        try:
            return Bell(keys, within(keys.clone), self._wake.set)
        except Exception:  # noqa: BLE001 - a store of the user's may raise anything
            return None

    def _call(self, keys: Any, most: int) -> None:
        """Call those that ask; keep those that answer."""
        keys.delete_key("asks")
        enough = most if self._unit == 1 else MOST_ANSWERS
        came = answers(keys, call(keys, "join"), enough, self._window)
        # One that is slow, as on a busy machine, is given more time by each call.
        self._window = JOIN_SECONDS if came else min(2 * self._window, LONGEST_SECONDS)
        # Meanwhile they may have been admitted: one answers each call until it has its welcome.
        if (record := self._leads()) is None or keys is not self._store.ready:
            return
        self.bars.pardon(came)
        free = [process for process in came if not self.bars.barred(process)]
        free = without(free, record.members)
        if self._unit > 1:
            self.waiting.place(keys, free, record.members)
        with self._lock:
            self._guests = self.bars.choose(free, self._unit, most, record.members)

    def _end_bell(self) -> None:
        """Have the thread of the bell end before Python does, if the store answers.

        Python makes no threads any more when it ends, so `within` cannot be used.
        """
        bell = self._bell
        if bell is None or bell.keys is not self._store.ready or self._lost_since is not None:
            return
        with contextlib.suppress(RuntimeError):
            ask(bell.keys)
            bell.join(END_SECONDS)

    # ---- another store

    def _note_lost(self, error: RuntimeError) -> None:
        if self._lost_since is not None or self._stopped:
            return
        self._lost_since = time.monotonic()
        self._store.lose(error)
        self.take()  # they have asked a store that is gone
        say(f"elastic: the store does not answer, so no rank can join: {error}")

    def _seek(self, record: Record) -> None:
        """Find a store, or serve one, that knows of the world."""
        now = time.monotonic()
        lost = self._lost_since is not None
        if not self._store.home or not (lost or self._store.address) or self._stopped:
            return
        if now - self._sought < SEEK_SECONDS:
            return
        self._sought = now
        served = self._at_home = self._at_home or self._store.look_at_home()
        if not lost:
            if served is not None:
                self._point_here(served, record)
            return
        if served is None and now - (self._lost_since or now) > SERVE_SECONDS:
            served = self._store.serve()
        self._at_home = None
        if served is not None and self._claim(served, record, ""):
            self._store.offer = served
            say(f"elastic: the store is served at {served.address} from now on")

    def _point_here(self, home: Served, record: Record) -> None:
        """Tell those that ask at home where the store is now, and that the world runs."""
        try:
            if self._claim(home, record, self._store.address):
                lease.beat(self._store.of_run(home.client), record.life, record.members)
        except RuntimeError:
            self._at_home = None

    def _claim(self, served: Served, record: Record, at: str) -> bool:
        """Tell that store of this world, and where its own store is; whether it knows no other."""
        rendezvous = Rendezvous(self._store.of_run(served.client), record.members[0])
        known = rendezvous.record()
        wanted = replace(record, store=at)
        succeeds = known is not None and self._succeeds(record, known)
        mine = known is None or not known.confirmed or succeeds
        if known is not None and known.life == record.life:
            mine = mine or bool(set(known.members) & set(record.members))
        if mine and (known == wanted or rendezvous.replace(known, wanted)):
            if known is not None and succeeds:
                lease.give_up(rendezvous.store, known.members)  # should they run, they learn it
            return True
        later = known is not None and known.life > record.life
        if later and lease.were_given_up(rendezvous.store, record.members):
            self.succeeded = True
        self._tell(
            f"the store at {served.address} knows of another world of this run: no rank that asks "
            "there can join this one"
        )
        return False

    def _succeeds(self, record: Record, known: Record) -> bool:
        """Tell whether this world was founded in the place of that one, as its own store says."""
        keys = self._store.ready
        earlier = keys is not None and known.life < record.life
        return earlier and lease.were_given_up(keys, known.members)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            say(f"elastic: {text}")
