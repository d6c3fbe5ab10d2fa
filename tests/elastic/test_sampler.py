"""The sampler: stock DataLoaders that prefetch, while members of a world die, leave and come."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lab.limits import seed
from ringcomm.elastic.sampler import Sampler, ahead_of

LENGTH, BATCH = 53, 4


class Numbers(Dataset[int]):
    """Each sample is its own index, so a batch tells which samples it has."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def place_of(sampler: Sampler) -> int:
    """Return how many batches, at the head of the queue, the newest iterator has given."""
    return sampler._reader.place if sampler._reader else 0


class Member:
    """A rank: a sampler, an iterator of its loader, and the batches of its step."""

    def __init__(self, uuid: str, workers: int, total: int | None) -> None:
        self.uuid = uuid
        self.sampler = Sampler(LENGTH, BATCH, seed=7, total_batch=total)
        self.loader = DataLoader(Numbers(), batch_sampler=self.sampler, num_workers=workers)
        self.batches: Iterator[torch.Tensor] | None = None  # the loader's
        self.held: list[list[int]] = []

    def draw(self) -> list[list[int]]:
        """Return the batches of a step: after an abort the same ones."""
        if self.batches is None:
            self.batches = iter(self.loader)
        share, deck = self.sampler._share, self.sampler._deck
        while len(self.held) < share:
            self.held.append(next(self.batches).tolist())
        prefetched = ahead_of(self.loader) - 1
        assert place_of(self.sampler) == len(self.held) + prefetched
        assert (
            self.held == [deck.batch(number) for number in deck.queues[self.uuid]][: len(self.held)]
        )
        return self.held[:share]

    def decide(self) -> None:
        del self.held[: self.sampler._share]
        self.sampler._decide()


class World:
    """Members in one process, and a ledger of the batches that went into decided steps."""

    def __init__(self, size: int, workers: int, accumulate: int, total: int | None) -> None:
        self.workers, self.total = workers, total
        self.accumulate = accumulate
        self.count = size
        self.used: Counter[tuple[int, ...]] = Counter()
        self.members = [self.make(number) for number in range(size)]
        self.bind()

    def make(self, number: int) -> Member:
        return Member(f"member {number}", self.workers, self.total)

    def names(self) -> list[str]:
        return [member.uuid for member in self.members]

    def bind(self) -> None:
        ahead = max(ahead_of(member.loader) for member in self.members) + self.accumulate - 1
        for member in self.members:
            member.sampler._bind(member.uuid, self.names(), ahead, self.accumulate)

    def step(self) -> None:
        for member in self.members:
            self.used.update(map(tuple, member.draw()))
        for member in self.members:
            member.decide()
        assert len({member.sampler._deck.digest() for member in self.members}) == 1

    def abort(self) -> None:
        for member in self.members:
            member.draw()

    def change(self, stay: list[Member], new: int) -> None:
        state = self.members[0].sampler.state_dict()
        joiners = [self.make(self.count + number) for number in range(new)]
        self.count += new
        self.members = [*stay, *joiners]
        for member in joiners:
            member.sampler._bind(member.uuid, self.names(), 1, 1)  # it does not know better yet
            member.sampler.load_state_dict(state)
        for member in self.members:
            member.sampler._deck.change(self.names())

    def check(self) -> None:
        """Each batch that was dealt is in a decided step, or else still pending; never both."""
        deck = self.members[0].sampler._deck
        pending = [number for queue in deck.queues.values() for number in queue] + deck.returned
        rest = Counter(tuple(deck.batch(number)) for number in pending)
        assert self.used + rest == Counter(tuple(deck.batch(k)) for k in range(deck.next))
        assert self.members[0].sampler.decided == self.used.total()


@pytest.mark.parametrize(
    ("workers", "accumulate", "total"), [(0, 1, None), (0, 3, None), (2, 1, None), (2, 1, 5)]
)
def test_loaders_live_through_changes(workers: int, accumulate: int, total: int | None) -> None:
    chance = random.Random(seed())
    world = World(2, workers, accumulate, total and total * BATCH)
    for number in range(45 if workers else 300):
        world.abort() if chance.random() < 0.3 else world.step()
        if number % 6 == 5:
            stay = chance.sample(world.members, chance.randint(1, len(world.members)))
            world.change(stay, chance.randint(0, 3 - len(stay)))
        if number % 50 == 49:
            world.bind()  # as if a member asked for more ahead
    world.check()
    assert world.members[0].sampler.epoch >= 2


def test_a_checkpoint_goes_on_in_another_world() -> None:
    world = World(3, 0, 1, None)
    for _ in range(7):
        world.step()
    file = io.BytesIO()
    torch.save(world.members[0].sampler.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = World(2, 2, 1, None)  # which prefetches more
    other.used = world.used
    for member in other.members:
        member.uuid += " of another world"
        member.sampler.load_state_dict(state)
    other.bind()
    assert other.members[0].sampler._deck.returned == []
    for _ in range(10):
        other.step()
    other.check()
    assert other.members[0].sampler.epoch == (7 * 3 + 10 * 2) * BATCH // LENGTH


# ---- Without a world


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("total", [None, 12])
def test_alone_each_iteration_is_an_epoch(workers: int, total: int | None) -> None:
    sampler = Sampler(10, 4, shuffle=False, total_batch=total)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    used: list[int] = []
    for epoch in range(4):
        assert sampler.epoch == epoch
        used += [index for batch in loader for index in batch.tolist()]
        assert len(used) >= 10 * (epoch + 1)
    assert used == [place % 10 for place in range(len(used))]
    assert len(used) == sampler.decided * 4
    assert len(loader) == 3


def test_alone_a_batch_may_hold_several_epochs() -> None:
    sampler = Sampler(3, 8, shuffle=False)
    assert len(sampler) == 1
    assert list(sampler) == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert sampler.epoch == 2
    assert list(sampler) == [[2, 0, 1, 2, 0, 1, 2, 0]]
    assert sampler.epoch == 5


def test_alone_a_world_takes_over() -> None:
    """It is not disturbed by batches that were tried, nor does it lose the one under way."""
    sampler = Sampler(10, 2, shuffle=False, total_batch=4)
    tried = iter(sampler)
    assert [next(tried) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert sampler.decided == 2
    sampler._bind("a", ["a", "b"], 1, 1)
    assert list(islice(sampler, 1)) == [[4, 5]]
    with pytest.raises(RuntimeError, match="iterate over the loader anew"):
        next(tried)


# ---- One sampler


def bound(ahead: int = 3, members: tuple[str, ...] = ("a", "b")) -> Sampler:
    sampler = Sampler(20, 2, shuffle=False)
    sampler._bind("a", list(members), ahead, 1)
    return sampler


def test_position_is_what_was_given_and_not_decided() -> None:
    sampler = bound()
    batches = iter(sampler)
    assert place_of(sampler) == 0
    assert [next(batches), next(batches)] == [[0, 1], [4, 5]]
    assert place_of(sampler) == 2
    sampler._decide()
    assert place_of(sampler) == 1
    assert next(iter(sampler)) == [4, 5]  # another iterator: from the first that is not decided
    assert next(batches) == [8, 9]
    for _ in range(3):
        sampler._decide()
    assert next(batches) == [16, 17]  # one was decided without it


def test_the_length_is_a_members_part_of_an_epoch() -> None:
    sampler = Sampler(53, 4)
    assert len(sampler) == 14
    for members, length in [(["a"], 14), (["a", "b"], 7), (["b", "a", "c"], 5)]:
        sampler._bind("a", members, 4, 2)
        assert len(sampler) == length
    sampler = Sampler(48, 4, total_batch=12)
    for members, length in [(["a"], 12), (["a", "b"], 8), (["b", "a"], 4)]:
        sampler._bind("a", members, 1, 1)
        assert len(sampler) == length


def test_a_loader_that_asks_for_more_is_told() -> None:
    sampler = bound(ahead=2)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=1)  # 2 ahead, and 1 to use
    batches = iter(loader)
    said = "asks for batch 3 of a queue of 2: give every rank the same num_workers and prefetch_"
    with pytest.raises(RuntimeError, match=said):
        next(batches)
    again = iter(sampler)
    assert len(list(islice(again, 2))) == 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match=said):
            next(again)
    sampler._deck.change(["b"])
    with pytest.raises(RuntimeError, match="this rank is not a member of the world"):
        next(again)
    assert sampler._share == 0


def test_a_state_of_another_sampler_is_refused() -> None:
    sampler = bound()
    before = sampler.state_dict()
    other = Sampler(20, 4, seed=1, shuffle=False)
    with pytest.raises(ValueError, match="of a sampler with batch_size=4, seed=1: make this one"):
        sampler.load_state_dict(other.state_dict())
    with pytest.raises(
        ValueError, match="this is not the state of a sampler, because length is not"
    ):
        sampler.load_state_dict({})
    with pytest.raises(ValueError, match=r"c is not one of the members \['a'\]: join"):
        sampler._bind("c", ["a"], 3, 1)
    assert sampler.state_dict() == before
    batches = iter(sampler)
    sampler.load_state_dict(before)
    with pytest.raises(RuntimeError, match="began before the sampler got its present state"):
        next(batches)


def test_the_total_batch_may_change() -> None:
    """From one step to the next; no sample is lost or repeated, also with what was dealt ahead."""
    members = [Sampler(40, 2, seed=1, total_batch=8) for _ in range(2)]
    for name, sampler in zip("ab", members, strict=True):
        sampler._bind(name, ["a", "b"], 3, 1)
    used: list[int] = []
    takes = 8
    for wanted in (12, 4, 8, 8, 8):
        for sampler in members:
            sampler.total_batch = wanted
            assert sampler.total_batch == wanted
        deck = members[0]._deck
        assert deck.digest(whole=False) == members[1]._deck.digest(whole=False)
        step = [sample for number in deck.present() for sample in deck.batch(number)]
        assert len(step) == takes
        used += step
        takes = wanted
        for sampler in members:
            sampler._decide()
    assert sorted(used) == list(range(40))


def test_a_total_batch_is_set_before_or_after_a_death() -> None:
    """Some members see the death first, and others set it first: it comes to the same."""
    members = [Sampler(40, 2, seed=1, total_batch=8) for _ in range(2)]
    for name, sampler in zip("ab", members, strict=True):
        sampler._bind(name, ["a", "b", "c"], 3, 1)
    members[0].total_batch = 12
    for name, sampler in zip("ab", members, strict=True):
        sampler._bind(name, ["a", "b"], 3, 1)
    assert members[0]._deck.digest(whole=False) != members[1]._deck.digest(whole=False)
    members[1].total_batch = 12
    assert members[0].state_dict() == members[1].state_dict()
    joiner = Sampler(40, 2, seed=1, total_batch=8)
    joiner.load_state_dict(members[0].state_dict())
    for sampler in (*members, joiner):
        sampler._deck.decide()
    assert {sampler._deck.total_batch for sampler in (*members, joiner)} == {12}
    assert len({sampler._deck.digest() for sampler in (*members, joiner)}) == 1


def test_sizes_that_cannot_be_set_are_refused() -> None:
    sampler = bound()
    with pytest.raises(AttributeError, match="batch_size=4: batches are dealt ahead"):
        sampler.batch_size = 4
    with pytest.raises(ValueError, match="this sampler was made without"):
        sampler.total_batch = 8
    sampler = Sampler(40, 2, total_batch=8)
    sampler._bind("a", ["a", "b"], 1, 1)
    with pytest.raises(ValueError, match="total_batch=2 has 1 batches a step, too few for 2"):
        sampler.total_batch = 2
    with pytest.raises(ValueError, match="total_batch=9 must be a multiple of batch_size=2"):
        sampler.total_batch = 9
    assert (sampler.batch_size, sampler.total_batch) == (2, 8)


# ---- What a loader holds


def loaded(sampler: Sampler, **more: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_sampler=sampler, **more)


def test_ahead_is_what_a_loader_prefetches_and_a_step_takes() -> None:
    sampler = Sampler(LENGTH, BATCH)
    assert ahead_of(loaded(sampler)) == 1
    assert ahead_of(loaded(sampler), 3) == 3
    assert ahead_of(loaded(sampler, num_workers=2)) == 5
    assert ahead_of(loaded(sampler, num_workers=2, prefetch_factor=4), 2) == 10


@pytest.mark.parametrize(
    ("loader", "accumulate", "error", "said"),
    [
        ([1, 2], 1, TypeError, "needs a DataLoader, not a list: DataLoader(dataset, batch_"),
        (DataLoader(Endless()), 1, TypeError, "needs a map-style dataset: Endless is iterable"),
        (DataLoader(Numbers(), 4), 1, TypeError, "is an elastic.Sampler, not a BatchSampler:"),
        (DataLoader(Numbers(), None), 1, TypeError, "is an elastic.Sampler, not a NoneType:"),
        (loaded(Sampler(60, 4)), 1, ValueError, "deals 60 samples, but the dataset has 53: make"),
        (loaded(Sampler(9, 4)), 0, ValueError, "accumulate=0 must be at least 1"),
        (
            *(loaded(Sampler(9, 4, total_batch=8)), 2, ValueError),
            "accumulate=2 contradicts total_batch=8",
        ),
        (
            *(loaded(Sampler(9, 4), num_workers=1, in_order=False), 1, ValueError),
            "in their order: leave out in_order=False",
        ),
    ],
)
def test_a_loader_that_cannot_be_dealt_to_is_told(
    loader: Any, accumulate: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as told:
        ahead_of(loader, accumulate)
    assert said in str(told.value)
