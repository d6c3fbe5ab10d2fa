"""Copies of shards, and the search for the newest step that all have, without processes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringcomm.elastic import copies, newest, random_states, transfer
from ringcomm.elastic.copies import Copies, Shard, shard_of
from ringcomm.elastic.newest import NONE, Found, search
from ringcomm.elastic.state import Tracked

# ---- the search


@dataclass
class Kept:
    """A source: the steps of which it has each shard, and those that turn out to be damaged."""

    steps: dict[int, list[int]]
    damaged: set[int] = field(default_factory=set)
    read: list[tuple[int, int]] = field(default_factory=list)
    histories: dict[int, int] = field(default_factory=dict)  # by step

    def latest(self, place: int, most: int | None) -> int:
        steps = self.steps.get(place, [])
        return max((step for step in steps if most is None or step <= most), default=NONE)

    def history(self, place: int, step: int) -> int:
        return self.histories.get(step, 0)

    def check(self, place: int, step: int) -> None:
        self.read.append((place, step))
        if step in self.damaged:
            self.steps[place].remove(step)


def search_all(monkeypatch: pytest.MonkeyPatch, ranks: list[Kept], places: list[int]) -> Found:
    """Search as so many ranks, each a thread; require that all come to the same answer."""
    told: list[list[int]] = [[] for _ in ranks]
    meet, mine = threading.Barrier(len(ranks)), threading.local()
    answers: list[Found] = []

    def tell(numbers: list[int]) -> list[list[int]]:
        meet.wait(10)
        told[mine.rank] = numbers
        meet.wait(10)
        return list(told)

    def run(rank: int) -> None:
        mine.rank = rank
        answers.append(search([ranks[rank]], places, max(places) + 1))

    monkeypatch.setattr(newest, "_tell", tell)
    monkeypatch.setattr(dist, "get_rank", lambda: mine.rank)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(answers) == len(ranks)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_the_newest_step_that_all_shards_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 lives; rank 1 came just now, and rank 0 holds a copy that is older than its own."""
    answer = search_all(monkeypatch, [Kept({0: [40, 41], 1: [39, 40]}), Kept({})], [0, 1])
    assert answer == Found(40, [0, 0], [])


def test_shards_of_two_courses_of_training_are_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """All were lost after one had written step 10, and again when the other one had."""
    first = Kept({0: [5, 10]}, histories={5: 1, 10: 1})
    second = Kept({1: [5, 10]}, histories={5: 1, 10: 2})
    assert search_all(monkeypatch, [first, second], [0, 1]) == Found(5, [0, 1], [])
    # Without an earlier step, that is no new beginning: some are missing, and not all.
    alone = [Kept({0: [10]}, histories={10: 1}), Kept({1: [10]}, histories={10: 2})]
    assert search_all(monkeypatch, alone, [0, 1]) == Found(NONE, [], [1])
    again = Kept({0: [10]}, histories={10: 2})
    answer = search_all(monkeypatch, [first, second, again], [0, 1, 0])
    assert answer == Found(10, [2, 1], [])


def test_a_shard_comes_from_its_own_rank_if_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = search_all(monkeypatch, [Kept({0: [7], 1: [7]}), Kept({1: [7]})], [0, 1])
    assert answer.givers == [0, 1]


def test_a_damaged_copy_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Kept({0: [4, 5], 1: [4, 5]}, damaged={5}), Kept({})]
    assert search_all(monkeypatch, ranks, [0, 1]) == Found(4, [0, 0], [])
    assert ranks[0].read[-2:] == [(0, 4), (1, 4)]


def test_a_shard_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search_all(monkeypatch, [Kept({0: [4]}), Kept({})], [0, 1]) == Found(NONE, [], [1])
    apart = [Kept({0: [4]}), Kept({1: [5]})]
    assert search_all(monkeypatch, apart, [0, 1]).step == NONE


# ---- copies


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_copies_take_a_twentieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    some = Copies(None, clock)
    assert some.wants(1)
    some._since, some._cost = clock.now, 0.1
    clock.now += 1.89
    assert not some.wants(2)
    clock.now += 0.02
    assert some.wants(3)
    monkeypatch.setenv("RINGCOMM_ELASTIC_COPY_STEPS", "3")
    assert [step for step in range(1, 10) if Copies(None, clock).wants(step)] == [3, 6, 9]
    monkeypatch.setenv("RINGCOMM_ELASTIC_COPY_STEPS", "0")
    assert not Copies(None, clock).wants(1)


def training(value: float) -> tuple[Tracked, nn.Module, Any]:
    net = nn.Linear(3, 2)
    nn.init.constant_(net.weight, value)
    opt = torch.optim.AdamW(net.parameters(), lr=value)
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    return Tracked(net=net, opt=opt), net, opt


def shard(tracked: Tracked, step: int, place: int = 0) -> Shard:
    packed = tracked.pack({copies.RANDOM: random_states.take()})
    data = torch.cat(packed.parts)
    return shard_of(place, step, packed.header, data)


def test_a_shard_has_all_that_training_goes_on_from() -> None:
    tracked, net, opt = training(0.5)
    torch.manual_seed(3)
    kept = shard(tracked, 9)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    drawn = torch.rand(4)
    other, other_net, other_opt = training(0.25)
    room = copies.room_for(kept.header)
    room.parts[0].copy_(kept.data)
    shard_of(0, 9, kept.header, room.parts[0]).load(other)
    assert torch.equal(torch.rand(4), drawn)
    assert all(torch.equal(value, state[key]) for key, value in other_net.state_dict().items())
    assert other_opt.param_groups[0]["lr"] == opt.param_groups[0]["lr"]
    mine, theirs = (next(iter(o.state.values()))["exp_avg"] for o in (opt, other_opt))
    assert torch.equal(mine, theirs)


def test_a_shard_that_was_changed_on_its_way_is_forgotten() -> None:
    tracked, _, _ = training(0.5)
    some, kept = Copies(None), shard(tracked, 9, place=1)
    some._generations[1].held = kept
    some.check(1, 9)
    assert some.latest(1, None) == 9
    kept.data[5] ^= 1
    some.check(1, 9)
    assert some.latest(1, None) == NONE


def test_the_step_that_all_go_back_to_is_kept_until_the_next_copy() -> None:
    tracked, _, _ = training(0.5)
    some, older = Copies(None), shard(tracked, 8)
    some._generations[0].own = older
    some._generations[0].held = replace(older, place=1)
    some._generations[1].own = replace(older, step=9)  # whose copy never came
    some.go_back(8, older)
    assert some._generations[1].steps() == [8, 8]
    assert some.latest(0, 8) == some.latest(1, 8) == 8
    some.cut()
    assert some.latest(0, None) == some.latest(1, None) == NONE
    assert transfer._hash(older.data)  # others may still be sending it
