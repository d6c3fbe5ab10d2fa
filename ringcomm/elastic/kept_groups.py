"""The process groups of a program, which live on over the changes of its world.

A group that the program has made stays the same object. After a change it has those of its ranks
that are left, in their order: the backend gets them in place, by `_reconfigure`. Groups that are
made later are connected in the same way. So no store is needed for either: after each change all
ranks tell one another how they are reached, and which groups they have.

A group that the program refers to no more goes with the next change.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ringcomm._runtime import groups
from ringcomm._runtime.backend import backend_of
from ringcomm.elastic import group_tables
from ringcomm.elastic.gathering import tell
from ringcomm.elastic.process import Process


@dataclass(frozen=True)
class Meeting:
    """How ranks of the present default group are reached for other groups, and if they copy."""

    handles: Sequence[str]  # by rank
    check: Callable[[], None]  # called while ranks meet; raises where they never will
    seconds: float
    copies: bool = False  # all of them would keep copies of shards

    def connect(self, backend: Any, number: int, ranks: Sequence[int]) -> None:
        """Give a group these ranks, all of which call this, with a `number` that is new to it.

        Raises DistBackendError where one of them is gone.
        """
        handles = [self.handles[rank] for rank in ranks]
        backend._reconfigure(number, handles, timedelta(seconds=self.seconds), self.check)


@dataclass
class _Kept:
    """A group, while the program has it."""

    group: Callable[[], Any]  # None: it is gone
    name: str
    uuids: tuple[str, ...]  # of the processes that it was made for, by rank
    row: group_tables.Row | None = None  # of torch's tables, while it is out of them

    @property
    def key(self) -> str:
        """The words that tell it from other groups, alike on all of its ranks."""
        return f"{self.name} {_number(*self.uuids):x}"


class KeptGroups:
    """The groups that the program of this process has made."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def note(self, members: Sequence[Process], others: Collection[Any] = ()) -> None:
        """Learn of the groups that were made over the present default group, of these members.

        But for those of other backends, and `others`.
        """
        known = [kept.group() for kept in self._kept]
        for group in group_tables.groups():
            if group in known or group in others or not _is_ours(group):
                continue
            uuids = tuple(members[rank].uuid for rank in group_tables.ranks_of(group))
            name = group_tables.name_of(group)
            self._kept.append(_Kept(weakref.ref(group), name, uuids))

    def take_out(self) -> None:
        """Take the groups out of torch's tables: the default group is about to be destroyed."""
        groups.connect = None
        for kept in [*self._kept]:
            group = kept.group()
            if group is not None and group_tables.is_in(group):
                kept.row = group_tables.take_out(group)
            elif kept.row is None:  # the program has destroyed it
                self._kept.remove(kept)

    def forget(self) -> None:
        """Keep none: this process leaves its world."""
        groups.connect = None
        self._kept.clear()

    def meet(
        self,
        number: int,
        members: Sequence[Process],
        check: Callable[[], None],
        seconds: float,
        copies: bool,
    ) -> Meeting:
        """Connect the groups for the present epoch, whose members have the default group.

        All of them call this. `number` is new to each epoch, and `copies` says whether this rank
        would keep copies of shards. Raises DistBackendError where one of them is gone.
        """
        alive = [(kept, group) for kept in self._kept if (group := kept.group()) is not None]
        self._kept = [kept for kept, _ in alive]
        out = sorted((pair for pair in alive if pair[0].row is not None), key=_key_of)
        mine = {
            "handle": backend_of()._reconfigure_handle(),
            "free": group_tables.first_free_number([kept.name for kept in self._kept]),
            "keys": [kept.key for kept, _ in out],
            "copies": copies,
        }
        told = [json.loads(words) for words in tell(json.dumps(mine))]
        every = all(rank["copies"] for rank in told)
        meeting = Meeting([rank["handle"] for rank in told], check, seconds, every)
        ranks = {process.uuid: rank for rank, process in enumerate(members)}
        for kept, group in out:  # in one order on all ranks: no two wait for each other
            assert kept.row is not None
            there = [ranks[uuid] for uuid in kept.uuids if uuid in ranks]
            there = [rank for rank in there if kept.key in told[rank]["keys"]]
            group_tables.put_in(group, kept.row, there)
            kept.row = None
            meeting.connect(backend_of(group), _number(str(number), kept.key), there)
        group_tables.count_names_from(max(rank["free"] for rank in told), number)

        def connect(backend: Any, name: str, some: list[int], timeout: timedelta) -> None:
            meeting_of_some = Meeting(meeting.handles, check, timeout.total_seconds())
            meeting_of_some.connect(backend, _number(str(number), "new", name), some)

        groups.connect = connect
        return meeting


def _key_of(pair: tuple[_Kept, Any]) -> str:
    return pair[0].key


def _number(*words: str) -> int:
    """63 bits of these words, the same in every process."""
    text = "\n".join(words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _is_ours(group: Any) -> bool:
    """Tell whether ringcomm alone serves a group, so that it can be given other ranks in place."""
    backends = [backend_of(group, device) for device in group._device_types]
    return all(backend is backends[0] and hasattr(backend, "_reconfigure") for backend in backends)
