"""The rules of membership that can be switched off, to see that the simulation misses each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from ringcomm.elastic import hang, lease, units, waiting, watch
from ringcomm.elastic.lease import Lapse
from ringcomm.elastic.process import Process
from ringcomm.elastic.rendezvous import Record, Rendezvous
from ringcomm.elastic.waiting import Waiting
from ringcomm.elastic.watch import Bars

Processes = Sequence[Process]


def nothing(*_: Any) -> None:
    pass


def gone_unread(keys: Any, processes: Processes) -> bool:
    """Processes see only what they see themselves: who is dead on their own host."""
    GONE(keys, processes)
    return all(process.is_dead() for process in processes)


def lapsed_unrecorded(self: Lapse, keys: Any, life: int, members: Processes) -> bool:
    return bool(LOOK(self, keys, life, ()))


def overwritten(self: Rendezvous, new: Record) -> bool:
    """A world writes its record over that of the world which was founded in its place."""
    self.store.set("world", new.to_text())
    return True


def not_recombined(members: Processes, unit: int) -> tuple[tuple[Process, ...], tuple[Any, ...]]:
    broken = [m for m in members if sum(m.unit == other.unit for other in members) < unit]
    spare = tuple(broken) if unit > 1 else ()
    return tuple(member for member in members if member not in spare), spare


def not_whole(came: Processes, unit: int, most: int) -> list[Process]:
    return [process for process in came if process.ready][:most]


LOOK, GONE = Lapse.look, lease.are_gone
# A name, and the stand-in that switches the rule off.
RULES: dict[str, tuple[Any, str, Any]] = {
    "begin": (waiting, "BEGIN_SECONDS", 0.0),  # a newcomer waits before it begins a unit
    "mates": (Waiting, "expect", nothing),  # those that will wait count before they ask
    "bars": (watch, "BAR_LONGEST", 0.0),  # one that failed to enter is not called for a while
    "forgive": (Bars, "forget", nothing),  # and all is forgotten once it has entered
    "alone": (Bars, "length", lambda self, process: 0.0),  # those that failed come one by one
    "gone": (lease, "are_gone", gone_unread),  # those that see a death tell others
    "lapse": (Lapse, "look", lapsed_unrecorded),  # and so do those that see a lease lapse
    "succeed": (lease, "succeed", nothing),  # a world is told that another has its place
    "compare": (Rendezvous, "bring_up_to_date", overwritten),  # a world that is over writes nothing
    "awaited": (hang, "within", lambda call: True),  # no rank hangs for which nobody waits
    "recombine": (units, "arrange", not_recombined),  # halves of broken units make whole ones
    "whole": (units, "complete", not_whole),  # guests come in whole units
    "over": (Rendezvous, "_is_over", lambda self: False),  # those that come too late end
}


@contextlib.contextmanager
def without(rule: str) -> Iterator[None]:
    """Switch a rule off meanwhile; none with the name ""."""
    if not rule:
        yield
        return
    with mock.patch.object(*RULES[rule]):
        yield
