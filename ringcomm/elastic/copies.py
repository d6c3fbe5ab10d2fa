"""Copies of shards in the memory of other ranks, while the world is one unit.

Where there are several units, each shard lies in several ranks. In the last one a death would lose
its shard. So each rank keeps its shard as it was after some step, and sends the same to a mate, on
another host if there is one: one copy under way, and the one before it, which is whole. In-memory
checkpoints with such peers are those of Gemini (Wang et al., SOSP 2023).

The ranks agree by their votes on the steps after which they copy (`is_due`), so that all shards are
of the same steps. Messages travel while training goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.elastic import random_states, transfer
from ringcomm.elastic.gathering import gather
from ringcomm.elastic.newest import NONE
from ringcomm.elastic.snapshot import host_memory
from ringcomm.elastic.state import Tracked
from ringcomm.elastic.transfer import Packed
from ringcomm.elastic.unit_groups import UnitGroups
from ringcomm.options import Variables

SHARE = 0.05  # of the time that training may stand still for copies
RANDOM, HISTORY = "random", "history"  # keys in a copy's header
CHECKSUM_BYTES = 8


def are_wanted() -> bool:
    """Tell whether the user of this rank wants copies. Raises ValueError for a wrong setting."""
    return Variables.elastic_copy_steps.read() != 0


@dataclass(frozen=True)
class Shard:
    """The state of one rank after a step, in host memory: a header, and the tensors' uint8[n]."""

    place: int
    step: int
    header: bytes
    data: Any
    checksum: int

    def packed(self) -> Packed:
        """Return it as `transfer.send` takes it, and `room_for` makes it on the other side."""
        return Packed(self.header, [self.data], 0)

    @property
    def history(self) -> int:
        """The course of training that it is of: see newest.py."""
        return int(transfer.decode(self.header)[HISTORY])

    def is_whole(self) -> bool:
        """Tell whether its bytes are those that were copied."""
        return _checksum(self.header, self.data) == self.checksum

    def load(self, tracked: Tracked) -> None:
        """Have training, and this process's random numbers, go on from it.

        Raises ValueError where the program tracks something else.
        """
        packed, offset = tracked.unpack(self.header), 0
        for part in packed.parts:
            part.copy_(self.data[offset : offset + part.numel()])
            offset += part.numel()
        tracked.finish()
        random_states.put(transfer.decode(self.header)[RANDOM])


def room_for(header: bytes) -> Packed:
    """Return host memory for the tensors of a shard."""
    leaves = transfer.decode(header)["leaves"]
    sizes = [math.prod(leaf.shape) * getattr(torch, leaf.dtype).itemsize for leaf in leaves]
    return Packed(header, [host_memory(sum(sizes))], 0)


def shard_of(place: int, step: int, header: bytes, data: Any) -> Shard:
    return Shard(place, step, header, data, _checksum(header, data))


def _memory(size: int, old: Any) -> Any:
    return old if old is not None and old.numel() == size else host_memory(size)


def _fill(data: Any, parts: list[Any]) -> None:
    if all(part.is_cpu for part in parts):
        torch.cat(parts, out=data)
        return
    for part, room in zip(parts, data.split([part.numel() for part in parts]), strict=True):
        room.copy_(part)


def _checksum(header: bytes, data: Any) -> int:
    words = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return transfer.fold(transfer._hash(words), transfer._hash(data))


@dataclass
class _Generation:
    """The shards of one step that lie here: this rank's own, and the one that it holds."""

    own: Shard | None = None
    held: Shard | None = None
    room: list[Any] = field(default_factory=lambda: [None, None])  # memory, which serves again

    def shards(self) -> list[Shard]:
        return [shard for shard in (self.own, self.held) if shard is not None]

    def steps(self) -> list[int]:
        return [shard.step for shard in self.shards()]


@dataclass
class _Message:
    """A copy on its way: the own shard to its holder, and another one to this rank."""

    into: _Generation
    place: int  # of the shard that comes
    head: Any  # its checksum and its header, uint8[n]
    data: Any
    works: list[Any]  # what receives, then what sends
    sent: list[Any]  # tensors that must live until the works have ended
    is_void: bool = False

    def end(self) -> None:
        """Wait for its end. Raises what the group raises; what has come by then stays."""
        for work in self.works[:2]:
            work.wait()
        if self.into.own is not None and not self.is_void:
            head, step = bytes(self.head.numpy().tobytes()), self.into.own.step
            checksum = int.from_bytes(head[:CHECKSUM_BYTES], "little")
            self.into.held = Shard(self.place, step, head[CHECKSUM_BYTES:], self.data, checksum)
        for work in self.works[2:]:
            work.wait()


class Copies:
    """The copies that one rank makes and holds. `groups` are those of units, if there are any."""

    def __init__(
        self, groups: UnitGroups | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Raises ValueError for a number of steps, RINGCOMM_ELASTIC_COPY_STEPS, that can't be."""
        self._groups, self._clock = groups, clock
        self.every: int | str = Variables.elastic_copy_steps.read()
        self._generations = [_Generation(), _Generation()]  # the last one is the newer
        self._message: _Message | None = None
        self.is_cut = True  # no copy may be used that was made before: the next is made at once
        self._cost = 0.0  # seconds that training stood still for the last one
        self._since = -math.inf  # its end

    def wants(self, step: int) -> bool:
        """Tell whether this rank would copy after `step`, if all others would, too."""
        if isinstance(self.every, int):
            return self.every > 0 and step % self.every == 0
        is_early = self._clock() - self._since < self._cost * (1 / SHARE - 1)
        return not is_early and (self._message is None or self._has_come())

    def _has_come(self) -> bool:
        return self._message is not None and all(w.is_completed() for w in self._message.works)

    # ---- making

    def make(self, step: int, tracked: Tracked, holders: list[int], history: int) -> None:
        """Copy this rank's shard, and send it to its holder: all ranks of the unit together.

        `holders` are the places of the holders, by place; `history`: see newest.py. Messages go on
        after this has returned, unless it is the first copy, or comes after `cut`. Raises what the
        unit's group raises.
        """
        assert self._groups is not None
        began, place = self._clock(), self._groups.place
        self.finish()
        packed = tracked.pack({RANDOM: random_states.take(), HISTORY: history})
        # Nobody has begun this operation before the last copy has come to it, and that is whole
        # then: the one before it may be written over.
        sizes = self._tell([CHECKSUM_BYTES + len(packed.header), packed.total_bytes])
        generation = self._generations.pop(0)
        self._generations.append(generation)
        generation.own = generation.held = None
        generation.room[0] = data = _memory(packed.total_bytes, generation.room[0])
        _fill(data, packed.parts)
        generation.own = shard_of(place, step, packed.header, data)
        giver = holders.index(place)
        self._message = self._exchange(generation, holders[place], giver, sizes[giver])
        if self.is_cut:
            self.finish()
            self.is_cut = False
        self._since = self._clock()
        self._cost = self._since - began

    def _tell(self, mine: list[int]) -> list[list[int]]:
        assert self._groups is not None
        every = torch.empty(self._groups.size * len(mine), dtype=torch.int64)
        gather(every, torch.tensor(mine), self._groups.unit)
        rows: list[list[int]] = every.view(-1, len(mine)).tolist()
        return rows

    def _exchange(self, generation: _Generation, to: int, giver: int, size: list[int]) -> _Message:
        """Begin to send the own shard, and to receive the giver's; places are the group's ranks."""
        assert generation.own is not None
        assert self._groups is not None
        own, group = generation.own, self._groups.unit
        generation.room[1] = data = _memory(size[1], generation.room[1])
        head = torch.empty(size[0], dtype=torch.uint8)
        mine = own.checksum.to_bytes(CHECKSUM_BYTES, "little") + own.header
        sent = [torch.frombuffer(bytearray(mine), dtype=torch.uint8), own.data]
        works = [dist.irecv(some, group=group, group_src=giver) for some in (head, data)]
        works += [dist.isend(some, group=group, group_dst=to) for some in sent]
        return _Message(generation, giver, head, data, works, sent)

    def finish(self) -> None:
        """Wait for the copy under way. Raises what the group raises: then it is none."""
        message, self._message = self._message, None
        if message is not None:
            message.end()

    def try_finish(self) -> None:
        """Keep the copy under way if all of it has come. The group has ended."""
        try:
            self.finish()
        except RuntimeError:
            return

    # ---- an end

    def cut(self) -> None:
        """Let no copy be used that was made so far: all ranks have done something together.

        Those that go back to an earlier step would not do it again, and one that comes would.
        """
        if self._message is not None:
            self._message.is_void = True
        for generation in self._generations:
            generation.own = generation.held = None
        self.is_cut = True

    def drop(self) -> None:
        """Keep no copies, and free their memory."""
        self.try_finish()
        self._generations = [_Generation(), _Generation()]
        self.is_cut, self._cost, self._since = True, 0.0, -math.inf

    # ---- as a source (newest.py)

    def latest(self, place: int, most: int | None) -> int:
        """Return the newest step, `most` at most, of which that shard lies here; NONE: of none."""
        steps = [shard.step for shard in self._shards(place) if most is None or shard.step <= most]
        return max(steps, default=NONE)

    def history(self, place: int, step: int) -> int:
        """Return that of the shard."""
        shard = self.shard(place, step)
        return shard.history if shard is not None else NONE

    def check(self, place: int, step: int) -> None:
        """Read all of a shard, and forget it if it was changed on its way."""
        shard = self.shard(place, step)
        if shard is None or shard.is_whole():
            return
        for generation in self._generations:
            generation.own = None if generation.own is shard else generation.own
            generation.held = None if generation.held is shard else generation.held

    def shard(self, place: int, step: int) -> Shard | None:
        return next((shard for shard in self._shards(place) if shard.step == step), None)

    def _shards(self, place: int) -> list[Shard]:
        newest_first = reversed(self._generations)  # both may be of one step, after a return
        every = [shard for some in newest_first for shard in some.shards()]
        return [shard for shard in every if shard.place == place]

    def go_back(self, step: int, own: Shard) -> None:
        """Keep the shards of that step until the next copy is whole. `own` is this rank's."""
        self._generations.sort(key=lambda some: some.steps().count(step))
        older, kept = self._generations
        if step not in [shard.step for shard in (kept.own,) if shard is not None]:
            kept.own, older.room = own, [None, None]  # it may lie there
        self.is_cut = True

    @property
    def nbytes(self) -> int:
        """How much memory the copies take."""
        rooms = [room for some in self._generations for room in some.room if room is not None]
        return sum(room.numel() for room in rooms)
