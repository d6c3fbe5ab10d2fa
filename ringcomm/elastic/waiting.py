"""The processes that wait to complete units, and which place a newcomer gets among them.

A newcomer gets its place before it makes its model, and keeps it. So the rank that leads has to
know of all others that will wait: the mates of a rank that died, before they have asked, and
newcomers that still make their models. The store keeps that, for the next one that leads.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ringcomm.elastic import units
from ringcomm.elastic.process import Process

KEY = "waiting"  # of the store
BEGIN_SECONDS = 2.0  # before a newcomer begins a unit

Known = tuple[str, int, str]  # a process, under whatever name


def _known(process: Process) -> Known:
    return process.host, process.pid, process.started


class Waiting:
    """Those that wait for others of their unit, as the rank that leads knows them."""

    def __init__(self, unit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._unit, self._clock = unit, clock
        self._since: dict[Known, float] = {}  # when a newcomer asked for the first time
        self._lock = threading.Lock()  # the main thread expects, and another one gives places
        self._all: dict[Known, Process] = {}
        self._entered: set[Known] = set()  # those that waited no more when the others met
        self._recalled = False

    def meet(self, members: Iterable[Process], broken: Iterable[Process]) -> None:
        """Note the members of an epoch that ended, and those whose unit is broken.

        The latter will ask to come in again. Of the others, those that died wait for nobody.
        """
        with self._lock:
            self._entered |= set(map(_known, members))
            for known in self._entered & self._all.keys():
                del self._all[known]
            self._expect(broken)

    def _expect(self, processes: Iterable[Process]) -> None:
        some = {_known(process): process for process in processes}
        self._all |= some
        self._entered -= some.keys()

    def place(self, keys: Any, came: Sequence[Process], members: Sequence[Process]) -> None:
        """Give each newcomer among those that came a place, by the store.

        All are given so that, with the others that wait, they complete as many units as can be. One
        that would begin a unit is left to ask again for a while: a new process may be here before
        the others know that one has died, or leaves, and whom it has to complete.
        """
        self._recall(keys)
        new = [process for process in came if process.place < 0]
        now = self._clock()
        self._since = {_known(p): self._since.get(_known(p), now) for p in new}
        with self._lock:
            self._expect(process for process in came if process.place >= 0)
            self._forget(came, members)
            inside = self._broken(came, members)
            given = [placed for process in new if (placed := self._placed(process, inside))]
            told = list(self._all.values())
        # Before they have them, because this rank may die: the next one that leads must know.
        keys.set(KEY, json.dumps([asdict(process) for process in told]))
        for process in given:
            keys.set(f"place/{process.uuid}", str(process.place))

    def _placed(self, new: Process, inside: Sequence[Process]) -> Process | None:
        """Return a newcomer with its place, or None where it has to ask again.

        `inside` are members that wait, too.
        """
        known, others = self._all.get(_known(new)), [*self._all.values(), *inside]
        is_early = self._clock() - self._since[_known(new)] < BEGIN_SECONDS
        if known is None and is_early and units.are_complete(others, self._unit):
            return None
        place = known.place if known else units.place_for(others, self._unit)
        self._all[_known(new)] = result = replace(new, place=place)
        return result

    def _broken(self, came: Sequence[Process], members: Sequence[Process]) -> Sequence[Process]:
        """Return the members that wait, or will as soon as the others know of a death.

        One whose launcher has started it anew has died.
        """
        anew = {(p.host, p.rank): _known(p) for p in came if p.rank >= 0}
        live = [p for p in members if anew.get((p.host, p.rank), _known(p)) == _known(p)]
        return units.arrange(live, self._unit)[1]

    def _recall(self, keys: Any) -> None:
        if not self._recalled and keys.check([KEY]):
            told = [Process(**fields) for fields in json.loads(keys.get(KEY).decode())]
            with self._lock:
                kept = {_known(p): p for p in told if _known(p) not in self._entered}
                self._all = kept | self._all
        self._recalled = True

    def _forget(self, came: Sequence[Process], members: Sequence[Process]) -> None:
        """Forget the dead, those that are members again, and those that were started anew."""
        inside = set(map(_known, members))
        anew = {(p.host, p.rank): _known(p) for p in [*members, *came] if p.rank >= 0}
        for known, process in list(self._all.items()):
            newer = anew.get((process.host, process.rank), known)
            if known in inside or newer != known or process.is_dead():
                del self._all[known]
