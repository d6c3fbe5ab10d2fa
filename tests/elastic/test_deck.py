"""The deck: whatever members do, each sample of each epoch is in exactly one decided step."""

from __future__ import annotations

import copy
import io
import json
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from lab.limits import seed
from ringcomm.elastic.deck import LONGEST_TABLE, Deck, Shuffle, Stream

HISTORIES = 60  # per kind
EVENTS = 60  # in each


class World:
    """Members with a deck each, and the ledger of what went into decided steps."""

    def __init__(self, first: Deck, chance: random.Random, events: list[str]) -> None:
        self.chance = chance
        self.events = events
        self.kind = type(first)
        self.count = 0
        self.used: list[list[int]] = []  # the batches of each decided step
        self.decks: dict[str, Deck] = {}
        most = first.most_members
        self.most = min(most or 6, 6)
        names = [self.name() for _ in range(chance.randint(1, self.most))]
        prefetched, accumulate = chance.randint(0, 5), chance.randint(1, 3)
        first.change(names, ahead=prefetched + accumulate, accumulate=accumulate)
        self.decks = {name: copy.deepcopy(first) for name in names}
        self.save()

    def name(self) -> str:
        self.count += 1
        return f"{self.chance.getrandbits(64):016x}{self.count}"

    @property
    def deck(self) -> Deck:
        return next(iter(self.decks.values()))

    def go_on(self) -> None:
        event = self.chance.choice(self.events)
        getattr(self, event)()
        assert len({deck.digest() for deck in self.decks.values()}) == 1
        assert self.deck.members == list(self.decks)

    def step(self) -> None:
        batches: list[int] = []
        for uuid, deck in self.decks.items():  # each member uses what its own deck says
            share = deck.share(uuid)
            assert share >= 1
            assert len(deck.queues[uuid]) >= share + deck.ahead - deck.accumulate
            batches += deck.queues[uuid][:share]
        self.used.append(batches)
        for deck in self.decks.values():
            deck.decide()

    def abort(self) -> None:
        """Nothing moves: the same batches come again."""

    def die(self) -> None:
        self.change(self.chance.sample(list(self.decks), self.chance.randint(1, len(self.decks))))

    def join(self) -> None:
        new = self.chance.randint(0, self.most - len(self.decks))
        self.change([*self.decks, *(self.name() for _ in range(new))])

    def swap(self) -> None:
        """Some die while others join, in one decision; a new one may come first."""
        stay = self.chance.sample(list(self.decks), self.chance.randint(1, len(self.decks)))
        names = [*stay, *(self.name() for _ in range(self.most - len(stay)))]
        self.change(self.chance.sample(names, len(names)))

    def shuffle(self) -> None:
        self.change(self.chance.sample(list(self.decks), len(self.decks)))

    def change(self, members: list[str]) -> None:
        word = json.dumps(next(iter(self.decks.values())).to_state())
        before = {uuid: list(queue) for uuid, queue in self.deck.queues.items()}
        decks = {uuid: self.decks.get(uuid) for uuid in members}
        self.decks = {
            uuid: deck or self.kind.from_state(json.loads(word)) for uuid, deck in decks.items()
        }
        for deck in self.decks.values():
            deck.change(members)
            for uuid in set(before) & set(members):
                kept = deck.queues[uuid][: len(before[uuid])]
                assert kept == before[uuid], "a survivor's queue begins with other batches"

    def save(self) -> None:
        self.saved = json.dumps([self.deck.to_state(), self.used])

    def lose_all(self) -> None:
        """Everybody dies; others load the checkpoint, and what came after it never happened."""
        state, self.used = json.loads(self.saved)
        names = [self.name() for _ in range(self.chance.randint(1, self.most))]
        self.decks = {uuid: self.kind.from_state(copy.deepcopy(state)) for uuid in names}
        for deck in self.decks.values():
            deck.change(names)

    def check(self) -> None:
        """Compare the ledger with the permutations, and with what the deck says of epochs."""
        deck, length, size = self.deck, self.deck.length, self.deck.batch_size
        batches = [number for step in self.used for number in step]
        assert deck.decided == len(batches)
        uses: dict[int, Counter[int]] = {}
        for number in batches:
            for place, index in enumerate(deck.batch(number), number * size):
                uses.setdefault(place // length, Counter())[index] += 1
        once = Counter(range(length))
        for epoch, counts in uses.items():
            assert not counts - once, f"epoch {epoch} has samples that are used twice"
        over = [epoch for epoch in sorted(uses) if deck.epoch_over(epoch)]
        assert over == list(range(deck.epoch))
        for epoch in over:
            assert uses[epoch] == once, f"epoch {epoch} is over but lacks samples"
        assert uses.get(deck.epoch) != once, f"epoch {deck.epoch} is complete but not over"


def deal(chance: random.Random, kind: type[Deck] = Deck, total: bool = False) -> Deck:
    size = chance.randint(1, 7)
    total_batch = size * chance.randint(1, 8) if total else None
    return kind(
        chance.randint(1, 90), size, chance.getrandbits(40), chance.random() < 0.8, total_batch
    )


ANY = ["step"] * 6 + ["abort", "die", "join", "swap", "shuffle", "save"]


@pytest.mark.parametrize("total", [False, True], ids=["share", "total_batch"])
@pytest.mark.parametrize("events", [ANY, [*ANY, "lose_all"]], ids=["churn", "total_loss"])
def test_each_sample_of_each_epoch_is_used_once(total: bool, events: list[str]) -> None:
    epochs = 0
    for number in range(HISTORIES):
        chance = random.Random(f"{seed()} {number} {total}")
        world = World(deal(chance, total=total), chance, events)
        for event in range(EVENTS):
            world.go_on()
            if event % 7 == 0:
                world.check()
        world.check()
        epochs += world.deck.epoch
    assert epochs > HISTORIES  # several epochs end in most histories


class Dropping(Deck):
    """Planted bug: the queue of a dead member is lost."""

    def _take_back(self, queue: list[int]) -> None:
        pass


class Doubling(Deck):
    """Planted bug: the first batch of the dead member is dealt twice."""

    def _take_back(self, queue: list[int]) -> None:
        super()._take_back(queue + queue[:1])


class Restarting(Deck):
    """Planted bug: survivors get new queues, as if their loaders began anew."""

    def change(
        self, members: list[str], *, ahead: int | None = None, accumulate: int | None = None
    ) -> None:
        super().change([], ahead=ahead, accumulate=accumulate)
        super().change(members)


class Forgetting(Deck):
    """Planted bug: one batch of a step is counted but stays in its queue."""

    def decide(self) -> None:
        first = [queue[0] for queue in self.queues.values()][:1]
        super().decide()
        next(iter(self.queues.values()))[:0] = first


class Counting(Deck):
    """Planted bug: an epoch ends when enough batches were decided, whichever they were."""

    @property
    def epoch(self) -> int:
        return self.decided * self.batch_size // self.length


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Dropping, "is over but lacks samples"),
        (Doubling, "has samples that are used twice"),
        (Restarting, "a survivor's queue begins with other batches"),
        (Forgetting, "has samples that are used twice"),
        (Counting, "is over but lacks samples"),
    ],
)
def test_planted_bugs_are_found(kind: type[Deck], sentence: str) -> None:
    def histories() -> None:
        for number in range(20):
            chance = random.Random(number)
            # There are no joins: the check of the joiner's state would find some bugs first.
            world = World(deal(chance, kind), chance, ["step", "step", "step", "die", "shuffle"])
            for _ in range(EVENTS):
                world.go_on()
                world.check()

    with pytest.raises(AssertionError, match=sentence):
        histories()


@pytest.mark.parametrize(
    ("members", "prefetched", "accumulate", "total"),
    [(1, 0, 1, None), (3, 4, 1, None), (4, 5, 3, None), (3, 5, 1, 4), (3, 5, 1, 8), (5, 7, 1, 13)],
)
def test_a_world_that_stays_uses_the_batches_in_order(
    members: int, prefetched: int, accumulate: int, total: int | None
) -> None:
    """With total_batch, a step so has the same samples for any number of members."""
    deck = Deck(50, 4, 0, True, total and 4 * total)
    names = [f"member {rank}" for rank in range(members)]
    deck.change(names, ahead=prefetched + accumulate, accumulate=accumulate)
    a_step = total or members * accumulate
    assert sum(deck.shares()) == a_step
    assert max(deck.shares()) - min(deck.shares()) <= 1
    assert deck.shares() == sorted(deck.shares(), reverse=True)
    for step in range(60):
        used = [number for name in names for number in deck.queues[name][: deck.share(name)]]
        assert sorted(used) == list(range(step * a_step, (step + 1) * a_step))
        deck.decide()
        for epoch in range(30):
            assert deck.epoch_over(epoch) == (deck.decided >= math.ceil((epoch + 1) * 50 / 4))


def test_returned_batches_are_dealt_first() -> None:
    deck = Deck(100, 2, 0, False, None)
    deck.change(["a", "b"], ahead=3)
    assert deck.queues == {"a": [0, 2, 4], "b": [1, 3, 5]}
    deck.change(["b", "c"])
    assert deck.queues == {"b": [1, 3, 5], "c": [0, 2, 4]}
    deck.change(["b"])
    assert deck.queues == {"b": [1, 3, 5]}
    assert deck.returned == [0, 2, 4]
    deck.decide()
    assert deck.queues == {"b": [3, 5, 0]}
    assert deck.returned == [2, 4]
    assert (deck.next, deck.decided, deck.epoch) == (6, 1, 0)


def test_shares_follow_the_number_of_members() -> None:
    deck = Deck(100, 2, 0, False, 10)
    assert deck.most_members == 5
    deck.change(["a", "b", "c"], ahead=3)
    assert deck.shares() == [2, 2, 1]
    assert {name: len(queue) for name, queue in deck.queues.items()} == {"a": 6, "b": 6, "c": 3}
    deck.change(["c"])
    assert deck.share("c") == 5
    assert deck.queues["c"][:3] == [2, 7, 12]
    assert len(deck.queues["c"]) == 7
    deck.change(["c", "d", "e", "f", "g"])
    assert deck.shares() == [1] * 5
    assert len(deck.queues["c"]) == 7  # longer than it needs, and kept


def test_batches_are_the_same_on_every_machine() -> None:
    """These values are part of the format of a checkpoint: other ones lose exactly-once."""
    deck = Deck(7, 3, 5, True, None)
    batches = [[6, 4, 2], [3, 1, 0], [5, 6, 2], [4, 5, 1], [3, 0, 5]]
    assert [deck.batch(number) for number in range(5)] == batches
    deck.change(["a", "b"], ahead=2)
    assert deck.digest() == 13618617525362647533
    assert Shuffle(10**8, 7).at(5, 8) == [54982558, 92774791, 62773331]


def test_each_epoch_and_seed_has_its_own_permutation() -> None:
    batches = {
        (number, epoch): tuple(Deck(40, 40, number, True, None).batch(epoch))
        for number in (-1, 0, 1, 2**70)
        for epoch in range(4)
    }
    assert len(set(batches.values())) == len(batches)
    assert all(sorted(batch) == list(range(40)) for batch in batches.values())
    plain = Deck(5, 4, 9, False, None)
    assert [plain.batch(number) for number in range(3)] == [
        [0, 1, 2, 3],
        [4, 0, 1, 2],
        [3, 4, 0, 1],
    ]
    assert Deck(2, 5, 9, False, None).batch(1) == [1, 0, 1, 0, 1]


def a_state(**other: Any) -> dict[str, Any]:
    deck = Deck(10, 2, 3, True, 8)
    deck.change(["x", "y", "z"], ahead=3)
    deck.decide()
    deck.change(["y", "z"])
    return deck.to_state() | other


def test_a_state_is_read_back_whole() -> None:
    state = a_state()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for read in (json.loads(json.dumps(state)), torch.load(file, weights_only=True)):
        deck = Deck.from_state(read)
        assert deck.to_state() == state
        assert deck.digest() == Deck.from_state(state).digest()
    deck.decide()
    assert state == a_state()  # a copy, which a deck does not change


def test_a_digest_tells_states_apart() -> None:
    deck = Deck.from_state(a_state())
    digests = [deck.digest()]
    deck.decide()
    digests.append(deck.digest())
    deck.change(["z", "y"])
    digests.append(deck.digest())
    deck.change(["z"])
    digests.append(deck.digest())
    digests += [Deck.from_state(a_state(**{name: 4})).digest() for name in ("seed", "ahead")]
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 2**64 for digest in digests)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"next": None}, "next is not of type int"),
        ({"seed": True}, "seed is not of type int"),
        ({"total_batch": 8.0}, "total_batch is neither a number nor None"),
        ({"members": ["y"]}, "its members are not those that have queues"),
        ({"members": ["y", 7]}, "its members are not those that have queues"),
        ({"queues": {"y": [1], "z": 2}}, "a queue is not of type list"),
        ({"next": 4}, "a batch is not one of the 4 that were dealt"),
        ({"returned": ["x"]}, "a batch is not one of the"),
        ({"returned": [5, 5]}, "a batch is in it twice, or not in its place"),
        ({"decided": 3}, "3 are decided"),
        ({"ahead": 0}, "accumulate is 1 and ahead 0"),
        ({"total_batch": 2}, "2 members are too many for total_batch=2"),
        ({"total_batch": 80}, "a member has too few batches for a step"),
    ],
)
def test_a_state_that_cannot_be_is_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"this is not the state of a sampler, because .*{said}"):
        Deck.from_state(a_state(**other))


def test_arguments_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="length=0 and batch_size=2 must be at least 1"):
        Deck(0, 2, 0, True, None)
    with pytest.raises(ValueError, match="total_batch=9 must be a multiple of batch_size=2"):
        Deck(10, 2, 0, True, 9)
    deck = Deck(10, 2, 0, True, 4)
    deck.change(["a", "b"], ahead=2)
    before = deck.digest()
    with pytest.raises(ValueError, match="too few for 3 members: raise it, or let fewer join"):
        deck.change(["a", "b", "c"])
    with pytest.raises(ValueError, match="names one twice"):
        deck.change(["a", "a"])
    with pytest.raises(ValueError, match="cannot take 3 batches a step and hold 2"):
        deck.change(["a"], accumulate=3)
    with pytest.raises(ValueError, match="c is no member, so no batches are dealt to it"):
        deck.share("c")
    assert deck.digest() == before


def test_a_shuffle_without_a_table_is_a_permutation() -> None:
    for length in [*range(1, 60), 1000, 4097, 65_537]:
        assert sorted(Shuffle(length, length).at(0, length)) == list(range(length))


def test_a_shuffle_without_a_table_shuffles() -> None:
    """Neighbors lie far apart, places do not stay, and each key has another order."""
    count = 100_000
    order = torch.tensor(Shuffle(count, 1).at(0, count), dtype=torch.float64)
    places = torch.arange(count, dtype=torch.float64)
    for first, second in ((order, places), (order[:-1], order[1:])):
        assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.02
    assert (order == places).sum() < 20
    parts = torch.bincount((order[: count // 2] % 100).long(), minlength=100)
    assert ((parts - count / 200) ** 2 / (count / 200)).sum() < 200  # 99 +- 14
    assert Shuffle(count, 1).at(0, 50) != Shuffle(count, 2).at(0, 50)
    assert Shuffle(count, 1).at(0, 50) == Shuffle(count, 1).at(0, 20) + Shuffle(count, 1).at(20, 50)


def test_long_data_has_no_table() -> None:
    length = LONGEST_TABLE + 1
    stream = Stream(length, seed=3, shuffle=True)
    across = stream.samples(length - 5, 10)
    assert across == stream.samples(length - 5, 5) + stream.samples(length, 5)
    assert not stream._permutations
    assert len(set(stream.samples(0, 1000))) == 1000
