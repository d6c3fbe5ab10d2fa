"""The deck: which member of an elastic world uses which batch of an endless stream of samples.

The stream is permutation(seed, epoch 0), permutation(seed, epoch 1), … without end. Batch k is its
positions kB … kB + B − 1, so nothing is padded or dropped, and batches cross the borders of epochs.

Batches are dealt ahead to the queues of the members. Only decided steps and changes of the members
move a deck. Each move is a function of the state alone, so the decks of all members stay equal.
Every batch below `next` is in one queue, or in `returned`, or it went into a decided step.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections import deque
from itertools import chain, count
from operator import itemgetter
from typing import Any

import numpy
import torch

PERMUTATIONS = 2  # that a stream holds: batches in use lie in the present epoch and the next one
LONGEST_TABLE = 1 << 22  # samples: a longer permutation is computed where it is needed
ROUNDS = 6
FIRST = itemgetter(0)
SPREAD, HALF, KEPT = (numpy.uint64(number) for number in (0xBF58476D1CE4E5B9, 32, 33))

# The keys of a state, with their types.
SETTINGS = {"length": int, "batch_size": int, "seed": int, "shuffle": bool}
NUMBERS = {"next": int, "decided": int, "ahead": int, "accumulate": int}
LISTS = {"members": list, "returned": list, "queues": dict}


def _hash(data: str) -> int:
    """64 bits, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(data.encode(), digest_size=8).digest(), "big")


class Shuffle:
    """A permutation of `length` numbers without a table of them, which a key chooses.

    A Feistel network permutes the pairs of the smallest rectangle that holds all numbers. The few
    that are too large are put through it again (Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, 2002). It mixes as splitmix64 does, which shuffles, and keeps no secret.
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        self._rows = numpy.uint64(math.isqrt(length - 1) + 1)
        self._columns = numpy.uint64(-(-length // int(self._rows)))
        self._keys = [numpy.uint64(_hash(f"{key} {number}")) for number in range(ROUNDS)]

    def at(self, first: int, last: int) -> list[int]:
        """Return the numbers at these places."""
        numbers = self._through(numpy.arange(first, last, dtype=numpy.uint64))
        while len(out := numpy.flatnonzero(numbers >= self._length)):
            numbers[out] = self._through(numbers[out])
        result: list[int] = numbers.tolist()
        return result

    def _through(self, numbers: Any) -> Any:
        row, column = numpy.divmod(numbers, self._columns)
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + _mix(column, first)) % self._rows
            column = (column + _mix(row, second)) % self._columns
        return row * self._columns + column


def _mix(numbers: Any, key: Any) -> Any:
    """Return 31 bits that depend on all bits of each number, and of the key."""
    mixed = (numbers + key) * SPREAD
    return ((mixed ^ (mixed >> HALF)) * SPREAD) >> KEPT


class Stream:
    """The endless sequence of sample indices. Positions count from 0 and never start anew."""

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self._permutations: dict[int, torch.Tensor] = {}  # the last one used comes last
        self._shuffles: dict[int, Shuffle] = {}

    def samples(self, start: int, count: int) -> list[int]:
        """Return the indices, from 0 to length − 1, at `count` positions from `start` on."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, first = divmod(start + len(indices), self.length)
            last = min(self.length, first + count - len(indices))
            if self.shuffle and self.length > LONGEST_TABLE:
                indices += self._shuffle(epoch).at(first, last)
            elif self.shuffle:
                indices += self._permutation(epoch)[first:last].tolist()
            else:
                indices += range(first, last)
        return indices

    def _shuffle(self, epoch: int) -> Shuffle:
        if epoch not in self._shuffles:
            self._shuffles = {epoch: Shuffle(self.length, _hash(f"{self.seed} {epoch}"))}
        return self._shuffles[epoch]

    def _permutation(self, epoch: int) -> torch.Tensor:
        kept = self._permutations.pop(epoch, None)
        if kept is None:
            while len(self._permutations) >= PERMUTATIONS:
                del self._permutations[next(iter(self._permutations))]
            generator = torch.Generator().manual_seed(_hash(f"{self.seed} {epoch}") >> 1)
            kept = torch.randperm(self.length, generator=generator)
        self._permutations[epoch] = kept
        return kept


class Deck:
    """The state of the dealing, equal on all members. It does no input or output.

    - `next`: the number of the first batch that was never dealt.
    - `returned`: sorted numbers of batches whose members went; they are dealt before `next`.
    - `queues`: member → numbers of its batches, in the order of use; its keys are in rank order.
    - `decided`: how many batches went into decided steps since the beginning.
    - `ahead`: how many batches a member holds: those that its loader prefetches, and `accumulate`.
    - `accumulate`: how many batches a member takes in a step, unless there is a `total_batch`.
    - `wanted_total`: the `total_batch` from the next step on.
    """

    def __init__(
        self, length: int, batch_size: int, seed: int, shuffle: bool, total_batch: int | None
    ) -> None:
        """Make a deck without members, of `length` samples an epoch, `batch_size` a batch.

        `total_batch` is how many samples a step takes over all members, or None. Raises ValueError
        if a count is below 1, or if `total_batch` is no multiple of `batch_size`.
        """
        if length < 1 or batch_size < 1:
            raise ValueError(
                f"a sampler needs samples and a batch size: length={length} and "
                f"batch_size={batch_size} must be at least 1"
            )
        _check_total(total_batch, batch_size)
        self.length = length
        self.batch_size = batch_size
        self.total_batch = self.wanted_total = total_batch
        self.stream = Stream(length, seed, shuffle)
        self.next = 0
        self.returned: list[int] = []
        self.queues: dict[str, list[int]] = {}
        self.decided = 0
        self.ahead = 1
        self.accumulate = 1
        self._named: tuple[str, ...] | None = None  # the members, of whom `_of_named` is a hash
        self._of_named = b""

    def batch(self, number: int) -> list[int]:
        """Return the `batch_size` sample indices of batch `number`."""
        return self.stream.samples(number * self.batch_size, self.batch_size)

    @property
    def members(self) -> list[str]:
        """The uuids of the members; a member's rank is its index."""
        return list(self.queues)

    @property
    def most_members(self) -> int | None:
        """How many members there may be, because each takes a batch a step. None: any number."""
        if self.total_batch is None or self.wanted_total is None:
            return None
        return min(self.total_batch, self.wanted_total) // self.batch_size

    @property
    def epoch(self) -> int:
        """The first epoch of which a sample has not been in a decided step.

        It goes by the batches themselves, not by their count. Members that go give batches back,
        and those may come after some of the next epoch.
        """
        first = min([self.next, *self.returned[:1], *map(min, filter(None, self.queues.values()))])
        return first * self.batch_size // self.length

    def epoch_over(self, epoch: int) -> bool:
        """Tell whether each sample of `epoch`, and of those before, has been in a decided step."""
        return self.epoch > epoch

    def shares(self) -> list[int]:
        """Return how many batches each member takes in the present step, by rank."""
        count = len(self.queues)
        if self.total_batch is None or not count:
            return [self.accumulate] * count
        least, more = divmod(self.total_batch // self.batch_size, count)
        return [least + (rank < more) for rank in range(count)]

    def share(self, uuid: str) -> int:
        """Return this member's batches in the present step. Raises ValueError for others."""
        if uuid not in self.queues:
            raise ValueError(f"{uuid} is no member, so no batches are dealt to it: join first")
        return self.shares()[self.members.index(uuid)]

    def present(self) -> list[int]:
        """Return the batches of the present step, of all members."""
        pairs = zip(self.shares(), self.queues.values(), strict=True)
        return [batch for share, queue in pairs for batch in queue[:share]]

    def decide(self) -> None:
        """Count each member's share as used, because the step was decided, and deal new batches."""
        shares = self.shares()
        for share, queue in zip(shares, self.queues.values(), strict=True):
            del queue[:share]
        self.decided += sum(shares)
        self._take_wanted_total()
        self._fill()

    def change(
        self, members: list[str], *, ahead: int | None = None, accumulate: int | None = None
    ) -> None:
        """Give the deck other members, in rank order; also another `ahead` and `accumulate`.

        Survivors keep their queues, which may grow at the end. The queues of the members that went
        are returned, and dealt before anything else. Nothing changes if this raises: ValueError for
        a member twice, for more than `most_members`, or unless 1 ≤ accumulate ≤ ahead.
        """
        ahead = self.ahead if ahead is None else ahead
        accumulate = self.accumulate if accumulate is None else accumulate
        if not 1 <= accumulate <= ahead:
            raise ValueError(
                f"a member cannot take {accumulate} batches a step and hold {ahead}: accumulate "
                "must be at least 1, and at most ahead"
            )
        if len(set(members)) < len(members):
            raise ValueError(f"a member has one rank only: {members} names one twice")
        if self.most_members is not None and len(members) > self.most_members:
            raise ValueError(self._too_few(self.total_batch, len(members)))
        self.ahead, self.accumulate = ahead, accumulate
        for uuid in self.queues.keys() - set(members):
            self._take_back(self.queues[uuid])
        self.queues = {uuid: self.queues.get(uuid, []) for uuid in members}
        self._fill()

    def want_total(self, total_batch: int) -> None:
        """Have all members together take so many samples, from the step after the present one on.

        Not from the present one: some members may have this before a change of the members, and
        others after it. Raises ValueError, and changes nothing, where `total_batch` cannot be, or
        has too few batches for the members.
        """
        _check_total(total_batch, self.batch_size)
        if total_batch // self.batch_size < len(self.queues):
            raise ValueError(self._too_few(total_batch, len(self.queues)))
        self.wanted_total, self._named = total_batch, None

    def _take_wanted_total(self) -> None:
        wanted = self.wanted_total
        if wanted != self.total_batch and (wanted or 0) // self.batch_size >= len(self.queues):
            self.total_batch, self._named = wanted, None

    def _too_few(self, total_batch: int | None, members: int) -> str:
        return (
            f"total_batch={total_batch} has {(total_batch or 0) // self.batch_size} batches a "
            f"step, too few for {members} members: raise it, or let fewer join"
        )

    def _take_back(self, queue: list[int]) -> None:
        self.returned = sorted(self.returned + queue)

    def _fill(self) -> None:
        """Deal batches until each member has those of its step, and those that it prefetches.

        They are dealt by steps, round robin within a step. Members of a larger share prefetch as
        many steps as the others do. So a world that does not change uses its batches in order.
        """
        shares = self.shares()
        queues = list(self.queues.values())
        prefetched, least = self.ahead - self.accumulate, min(shares, default=1)
        alike = len({*map(len, queues)}) <= 1 and len({*shares}) <= 1 and not self.returned
        if alike and queues:  # as at nearly all steps: there is nothing to sort
            for _ in range(len(queues[0]), least + prefetched):
                deque(map(list.append, queues, count(self.next)), maxlen=0)
                self.next += len(queues)
            return
        places: list[tuple[int, int, int]] = []  # that are empty: the step, the place in it, rank
        for rank, share in enumerate(shares):
            held = share + math.ceil(prefetched * share / least)
            empty = range(len(queues[rank]), held)
            places += [(place // share, place % share, rank) for place in empty]
        for _, _, rank in sorted(places):
            if self.returned:
                queues[rank].append(self.returned.pop(0))
            else:
                queues[rank].append(self.next)
                self.next += 1

    def settings(self) -> dict[str, Any]:
        """Return the arguments that the deck was made with, by name."""
        return {
            "length": self.length,
            "batch_size": self.batch_size,
            "seed": self.stream.seed,
            "shuffle": self.stream.shuffle,
            "total_batch": self.total_batch,
        }

    def to_state(self) -> dict[str, Any]:
        """Return a copy of all that the deck is, of plain types, for JSON or for `torch.save`."""
        return {
            **self.settings(),
            "next": self.next,
            "decided": self.decided,
            "ahead": self.ahead,
            "accumulate": self.accumulate,
            "wanted_total": self.wanted_total,
            "returned": list(self.returned),
            "members": self.members,
            "queues": {uuid: list(queue) for uuid, queue in self.queues.items()},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Deck:
        """Make the deck that `state` is of. Raises ValueError if no deck can have that state.

        `change` then gives it the members of another world.
        """
        problem = _types(state)
        if problem is None:
            settings = {name: state[name] for name in (*SETTINGS, "total_batch")}
            deck = cls(**settings)
            for name in (*NUMBERS, "returned"):
                setattr(deck, name, state[name])
            deck.returned = list(deck.returned)
            deck.wanted_total = state.get("wanted_total", deck.total_batch)  # older ones have none
            deck.queues = {uuid: list(state["queues"][uuid]) for uuid in state["members"]}
            problem = deck._flaw()
            if problem is None:
                return deck
        raise ValueError(f"this is not the state of a sampler, because {problem}: load a whole one")

    def _flaw(self) -> str | None:
        """Say what cannot be so in a deck, if anything. The types are right already."""
        numbers = [number for queue in self.queues.values() for number in queue] + self.returned
        if not all(type(number) is int and 0 <= number < self.next for number in numbers):
            return f"a batch is not one of the {self.next} that were dealt"
        if len(set(numbers)) < len(numbers) or self.returned != sorted(self.returned):
            return "a batch is in it twice, or not in its place"
        if self.decided != self.next - len(numbers):
            return f"of {self.next} batches {self.decided} are decided and {len(numbers)} are not"
        if not 1 <= self.accumulate <= self.ahead:
            return f"accumulate is {self.accumulate} and ahead {self.ahead}"
        if len(self.queues) > (self.most_members or len(self.queues)):
            return f"{len(self.queues)} members are too many for total_batch={self.total_batch}"
        queues = self.queues.values()
        if any(len(queue) < share for queue, share in zip(queues, self.shares(), strict=True)):
            return "a member has too few batches for a step"
        return None

    def digest(self, *, whole: bool = True) -> int:
        """Return 64 bits of the state, to compare with other members'.

        Unless `whole`, as for each step, of each queue's first batch only: it is what is used next.
        """
        if self._named != (named := tuple(self.queues)):
            wanted = [] if self.wanted_total == self.total_batch else [self.wanted_total]
            settings = json.dumps([self.settings(), named, *wanted], separators=(",", ":"))
            self._named, self._of_named = named, hashlib.blake2b(settings.encode()).digest()
        result = hashlib.blake2b(self._of_named, digest_size=8)
        queues = [self.returned, *self.queues.values()]
        numbers = [self.next, self.decided, self.ahead, self.accumulate, *map(len, queues)]
        numbers += chain.from_iterable(queues) if whole else map(FIRST, filter(None, queues))
        result.update(array("q", numbers))
        return int.from_bytes(result.digest(), "big")


def _check_total(total_batch: int | None, batch_size: int) -> None:
    if total_batch is not None and (total_batch < 1 or total_batch % batch_size):
        raise ValueError(
            f"total_batch={total_batch} must be a multiple of batch_size={batch_size}, so that "
            "a step takes whole batches"
        )


def _types(state: dict[str, Any]) -> str | None:
    """Say which entry of `state` is missing or of a wrong type, if any is."""
    if type(state) is not dict:
        return f"it is of type {type(state).__name__}"
    for name, kind in {**SETTINGS, **NUMBERS, **LISTS}.items():
        if type(state.get(name)) is not kind:
            return f"{name} is not of type {kind.__name__}"
    if "total_batch" not in state or type(state["total_batch"]) not in (int, type(None)):
        return "total_batch is neither a number nor None"
    members, queues = state["members"], state["queues"]
    named = all(type(uuid) is str for uuid in members)
    if not named or len(set(members)) < len(members) or set(members) != queues.keys():
        return "its members are not those that have queues"
    if not all(type(queue) is list for queue in queues.values()):
        return "a queue is not of type list"
    return None
