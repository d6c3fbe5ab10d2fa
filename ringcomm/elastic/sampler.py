"""The sampler of an elastic world: a batch sampler that gives a stock DataLoader a member's share.

It is a deck (deck.py), and the place in it up to which a loader has asked. A feed has the batches
of the loader that no decided step has used yet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data
from torch.utils import _pytree as tree

from ringcomm.elastic.deck import Deck

ALONE = "alone"  # the one member of a sampler that no world has bound

HOW = "DataLoader(dataset, batch_sampler=elastic.Sampler(len(dataset), batch_size))"


class Sampler(torch.utils.data.Sampler[list[int]]):
    """Deals the batches of an endless shuffled stream to the members of a world.

    Each sample of each epoch is used in exactly one decided step, while members die, leave and
    come. Use it as `DataLoader(dataset, batch_sampler=sampler, num_workers=2)`.

    In a world, an iterator never ends. It gives this member's batches in the order of its queue,
    and stays good while the world changes. It may run ahead of the decided steps by as many batches
    as `_bind` agreed on. A second iterator begins with the first batch that is not decided.

    Without a world, an iterator ends with an epoch. A step is then decided when its last batch was
    asked for; prefetched batches are lost if its iterator is dropped.

    A world drives the sampler by `_bind` and `_decide`: the same calls on each member. It reads
    `_share` and the `_deck`.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        total_batch: int | None = None,
        per_unit: bool = False,
    ) -> None:
        """Make a sampler of the indices from 0 to `length` − 1, `batch_size` of them a batch.

        `seed` gives each epoch its own permutation; without `shuffle` the indices keep their order.
        `total_batch` is how many samples a step takes over all members, whatever their number; it
        is a multiple of `batch_size`. With `per_unit` the ranks of a unit get the same batches, as
        tensor parallelism needs. Raises ValueError for counts that cannot be.
        """
        self._per_unit = per_unit
        self._deck = Deck(length, batch_size, seed, shuffle, total_batch)
        self._uuid: str | None = None
        self._used = 0  # how many batches of this member's queue were in decided steps
        self._reader: _Reader | None = None  # the newest iterator

    @property
    def epoch(self) -> int:
        """The first epoch, from 0, of which a sample has not been in a decided step."""
        return self._deck.epoch

    @property
    def decided(self) -> int:
        """How many batches, of all members, went into decided steps since the beginning."""
        return self._deck.decided

    @property
    def batch_size(self) -> int:
        """How many samples a batch has. Raises AttributeError if it is set."""
        return self._deck.batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        raise AttributeError(
            f"batch_size={value}: batches are dealt ahead by their numbers, so their size stays; "
            "make the sampler with a total_batch, which may change"
        )

    @property
    def total_batch(self) -> int | None:
        """How many samples a step takes over all members; None: a member takes what it is given.

        Set it between two steps, on all ranks alike: from the step after the next on, all take so
        many. Raises ValueError for a number that cannot be, or where the sampler was made without.
        """
        return self._deck.wanted_total

    @total_batch.setter
    def total_batch(self, value: int) -> None:
        if self._deck.total_batch is None:
            raise ValueError(
                f"total_batch={value}: this sampler was made without, so its steps take no lists "
                "of batches; make it with a total_batch"
            )
        self._deck.want_total(value)

    def __len__(self) -> int:
        """How many batches this member takes in an epoch, at the present size; rounded up."""
        deck = self._deck
        if self._uuid not in deck.queues:
            return math.ceil(deck.length / deck.batch_size)
        a_step = sum(deck.shares()) * deck.batch_size
        return math.ceil(deck.length * deck.share(self._uuid) / a_step)

    def __iter__(self) -> Iterator[list[int]]:
        if self._uuid is None and self._deck.members != [ALONE]:
            self._deck.change([ALONE], ahead=1, accumulate=1)
        self._reader = _Reader(self)
        return self._reader

    def state_dict(self) -> dict[str, Any]:
        """Return the state, equal on all members, of plain types: also for `weights_only=True`."""
        return self._deck.to_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of another member, or of a checkpoint, before a loader iterates.

        Its members stay those of the state until `_bind` names the present ones. The batches of the
        others are then dealt anew. Raises ValueError, and keeps the old state, if the state is not
        whole, or of a sampler with other arguments; `total_batch` may have changed since.
        """
        deck = Deck.from_state(state)
        theirs, mine = deck.settings(), self._deck.settings()
        if None not in (deck.total_batch, self._deck.total_batch):
            mine["total_batch"] = deck.total_batch
        other = ", ".join(f"{name}={theirs[name]}" for name in mine if theirs[name] != mine[name])
        if other:
            raise ValueError(
                f"the state is of a sampler with {other}: make this one with the same arguments"
            )
        self._deck = deck
        self._forget()

    def name_of(self, process: Any) -> str:
        """Return the name under which batches are dealt to a member: its own, or its unit's."""
        return str(process.unit if self._per_unit and process.unit else process.uuid)

    def _bind(self, uuid: str, members: list[str], ahead: int, accumulate: int) -> None:
        """Make this the sampler of member `uuid` of a world of `members`, which are in rank order.

        `ahead` is the largest `ahead_of` of all members; with `accumulate` it is the same on all.
        Call it again, on all members, when these two change, or after a checkpoint was loaded; what
        loaders hold stays good. Raises ValueError, as `Deck.change`, or for an unknown `uuid`.
        """
        if uuid not in members:
            raise ValueError(f"{uuid} is not one of the members {members}: join the world first")
        self._deck.change(members, ahead=ahead, accumulate=accumulate)
        if uuid != self._uuid:
            self._uuid = uuid
            self._forget()

    def _decide(self) -> None:
        """Count each member's first `_share` batches as used: call it once for a decided step.

        It comes before the `_bind` that a death in this step leads to.
        """
        self._used += self._share
        self._deck.decide()

    @property
    def _share(self) -> int:
        """How many batches this member takes in the present step; 0 if it is not a member."""
        uuid = self._uuid or ALONE
        return self._deck.share(uuid) if uuid in self._deck.queues else 0

    def _forget(self) -> None:
        """Part from the iterators: their batches have no place in the queue any more."""
        if self._reader:
            self._reader.stale = True
        self._reader = None
        self._used = 0


class _Reader(Iterator[list[int]]):
    """An iterator of a sampler. It counts the batches that it gave, decided ones included."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.given = sampler._used
        self.epoch = sampler.epoch
        self.stale = False

    @property
    def place(self) -> int:
        """Where in the queue its next batch is. Batches decided without it are not given."""
        return max(0, self.given - self.sampler._used)

    def __next__(self) -> list[int]:
        sampler = self.sampler
        deck, place, alone = sampler._deck, self.place, sampler._uuid is None
        if self.stale:
            raise RuntimeError(
                "this iterator began before the sampler got its present state: iterate over the "
                "loader anew"
            )
        if alone and deck.epoch_over(self.epoch):
            raise StopIteration
        queue = deck.queues.get(sampler._uuid or ALONE)
        if queue is None:
            raise RuntimeError(
                "this rank is not a member of the world, so no batches are dealt to it: iterate "
                "over world.batches(loader) only"
            )
        if place >= len(queue):
            raise RuntimeError(
                f"the loader asks for batch {place + 1} of a queue of {len(queue)}: give every "
                "rank the same num_workers and prefetch_factor, and iterate over "
                "world.batches(loader) only"
            )
        batch = deck.batch(queue[place])
        self.given = sampler._used + place + 1
        if alone and place + 1 == sampler._share:
            sampler._decide()
        return batch


def ahead_of(loader: Any, accumulate: int = 1) -> int:
    """Return how many batches a member has to hold for `loader`: the `ahead` of `Sampler._bind`.

    These are the batches that its workers prefetch, and the `accumulate` ones that a step takes.
    Raises TypeError for a loader that cannot be dealt to: no DataLoader, of an iterable dataset,
    or of another batch sampler. Raises ValueError for settings that break the order of batches, or
    that contradict each other.
    """
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise TypeError(f"world.batches needs a DataLoader, not a {type(loader).__name__}: {HOW}")
    dataset, sampler = loader.dataset, loader.batch_sampler
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise TypeError(
            f"world.batches needs a map-style dataset: {type(dataset).__name__} is iterable, so "
            "its samples cannot be dealt to ranks by their indices"
        )
    if not isinstance(sampler, Sampler):
        raise TypeError(
            "world.batches needs a loader whose batch_sampler is an elastic.Sampler, not a "
            f"{type(sampler).__name__}: {HOW}"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError("world.batches needs the batches in their order: leave out in_order=False")
    length = sampler._deck.length
    if hasattr(dataset, "__len__") and len(dataset) < length:
        raise ValueError(
            f"the sampler deals {length} samples, but the dataset has {len(dataset)}: make it with "
            "length=len(dataset)"
        )
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} must be at least 1: a step takes a batch")
    if accumulate > 1 and sampler._deck.total_batch is not None:
        raise ValueError(
            f"accumulate={accumulate} contradicts total_batch={sampler._deck.total_batch}, which "
            "says how many batches a step takes: leave one out"
        )
    return loader.num_workers * (loader.prefetch_factor or 0) + accumulate


class Feed:
    """One iterator over a loader, for the whole run: workers and prefetched batches are kept."""

    def __init__(self, loader: Any, sampler: Sampler, accumulate: int) -> None:
        """Raises what `ahead_of` raises, and ValueError for a loader of another sampler."""
        self.ahead = ahead_of(loader, accumulate)
        if loader.batch_sampler is not sampler:
            raise ValueError("the loader has another sampler than the one given to world.track")
        self.loader = loader
        self._accumulate = accumulate
        self._sampler = sampler
        self._iterator: Iterator[Any] | None = None
        self._drawn: deque[Any] = deque()
        self._used = 0
        self._versions: list[tuple[torch.Tensor, int]] = []  # the batches that were given

    def is_of(self, loader: Any, accumulate: int) -> bool:
        return self.loader is loader and self._accumulate == accumulate

    def batches(self) -> Any:
        """Return a step's batch, the same until it is decided; a list where it may be several."""
        sampler = self._sampler
        if self._iterator is None:
            self._iterator, self._used = self._begin(), sampler._used
        for _ in range(min(sampler._used - self._used, len(self._drawn))):
            self._drawn.popleft()
        self._used = sampler._used
        while len(self._drawn) < sampler._share:
            self._drawn.append(next(self._iterator))
        given = [self._drawn[index] for index in range(sampler._share)]
        tensors = [leaf for leaf in tree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        self._versions = [(leaf, leaf._version) for leaf in tensors if not leaf.is_inference()]
        several = self._accumulate > 1 or sampler._deck.total_batch is not None
        return given if several else given[0]

    def _begin(self) -> Iterator[Any]:
        """Begin to load, and leave random numbers as they are.

        A loader draws its workers' seed here, once in a run. One that goes back to a step would
        draw another one, and its steps would have other numbers than those they had at first.
        """
        generator = self.loader.generator or torch.default_generator
        state = generator.get_state()
        try:
            return iter(self.loader)
        finally:
            generator.set_state(state)

    def begin_anew(self) -> None:
        """Drop what the loader has given: the sampler has another state."""
        self._iterator = None
        self._drawn.clear()
        self._versions = []

    def check(self) -> None:
        """Raise RuntimeError if the program has changed a batch that may be needed once more."""
        if any(leaf._version != version for leaf, version in self._versions):
            raise RuntimeError(
                "a batch of world.batches was changed in place, and a step that is computed again "
                "needs it as it was: change a copy"
            )
