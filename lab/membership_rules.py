"""The rules of membership that can be switched off, to see that the simulation misses each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from ringcomm.elastic import hang, lease, pulse, units, waiting, watch
from ringcomm.elastic.changes import Changes
from ringcomm.elastic.entrance import Entrance
from ringcomm.elastic.epochs import Epochs
from ringcomm.elastic.errors import Evicted
from ringcomm.elastic.hang import Progress
from ringcomm.elastic.lease import Lapse
from ringcomm.elastic.process import Process
from ringcomm.elastic.pulse import Pulse, Pulses
from ringcomm.elastic.rendezvous import Record, Rendezvous
from ringcomm.elastic.waiting import Waiting
from ringcomm.elastic.watch import Bars
from ringcomm.elastic.world import World

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


def not_whole(came: Processes, unit: int, most: int, members: Processes = ()) -> list[Process]:
    return [process for process in came if process.ready][:most]


def whole_or_not(members: Processes, unit: int) -> tuple[tuple[Process, ...], tuple[Any, ...]]:
    return tuple(members), ()


def ended_as_spare(self: World) -> None:
    if self._changes is not None and self._changes.is_spare:
        raise Evicted("its unit is broken")


def at_once(self: Changes, extra: str = "", *, failed: bool = False) -> bool:
    """Guests become members with the next decision, whether they have the state or not."""
    guests = " ".join("+" + guest.uuid for guest in self.epochs.guests)
    return MEET(self, extra or guests, failed=failed)


def only_guests(self: Changes, failed: list[Process]) -> None:
    BAR(self, [process for process in failed if process.uuid not in self.on_probation])


def silent(self: Epochs, *words: Any, **more: Any) -> Any:
    """A guest that has the state gives no signs of life any more."""
    if self.pulse is not None:
        self.pulse.end()
    return AGREE(self, *words, **more)


def founding(self: Entrance, timeout: float, *, founds: bool = True) -> Any:
    return ASK(self, timeout)


def never_waited(self: Progress, usually: bool = True, after: float = 0.0) -> float:
    return STILL_FOR(self, usually)


AGREE, ASK, STILL_FOR = Epochs.agree, Entrance.ask, Progress.still_for
LOOK, GONE, MEET, BAR = Lapse.look, lease.are_gone, Changes.meet, Changes._bar
# A name, and the stand-in that switches the rule off.
RULES: dict[str, tuple[Any, str, Any]] = {
    "begin": (waiting, "BEGIN_SECONDS", 0.0),  # a newcomer waits before it begins a unit
    "recall": (Waiting, "_recall", nothing),  # the next one that leads knows them, too
    "mates": (Waiting, "meet", nothing),  # those that will wait count before they ask
    "bars": (watch, "BAR_LONGEST", 0.0),  # one that failed to enter is not called for a while
    "forgive": (Bars, "forget", nothing),  # and all is forgotten once it has entered
    "pardon": (Bars, "pardon", nothing),  # or where another one has ended that failed with it
    "alone": (Bars, "length", lambda self, process: 0.0),  # those that failed come one by one
    "gone": (lease, "are_gone", gone_unread),  # those that see a death tell others
    "lapse": (Lapse, "look", lapsed_unrecorded),  # and so do those that see a lease lapse
    "succeed": (lease, "succeed", nothing),  # a world is told that another has its place
    "compare": (Rendezvous, "bring_up_to_date", overwritten),  # a world that is over writes nothing
    "awaited": (hang, "within", lambda call: True),  # no rank hangs for which nobody waits
    "recombine": (units, "arrange", not_recombined),  # halves of broken units make whole ones
    "whole": (units, "complete", not_whole),  # guests come in whole units
    "drop": (units, "arrange", whole_or_not),  # a death drops its unit
    "spare": (World, "_wait_if_spare", ended_as_spare),  # whose other ranks come in again as guests
    "founds": (Entrance, "ask", founding),  # and which found no world, for they are in the midst
    "confirm": (Changes, "meet", at_once),  # a guest is no member before it has the state
    "probation": (Changes, "_bar", only_guests),  # nor trusted before it has made a step
    "signs": (pulse, "MISSED", 1 << 30),  # nobody waits for a guest that gives no sign of life
    "progress": (pulse, "STILL_SECONDS", 1e9),  # or makes no progress
    "together": (Pulses, "_move_together", nothing),  # but for one that waits for slower guests
    "until": (Epochs, "agree", silent),  # signs of life go on until it is a member
    "pieces": (Pulse, "step", nothing),  # a guest tells of its progress
    "patient": (Bars, "failures", lambda self, process: 0),  # one that lives is given more time
    "hung": (hang, "end_of_a_hang", nothing),  # a rank that hangs ends
    "left": (Epochs, "is_left", lambda self, keys: False),  # also when others don't wait any more
    "usual": (hang, "USUAL_STEPS", 0),  # and one does not whose step is only slow
    "waited": (Progress, "still_for", never_waited),  # or which has only waited for others
    "stopped": (Progress, "pass_over", nothing),  # or which was stopped as a whole
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
