"""Units of a world: which ranks stand together, and which wait, from lists alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import seed
from ringcomm import Options
from ringcomm.elastic import joining, units
from ringcomm.elastic.errors import Evicted
from ringcomm.elastic.process import Process
from ringcomm.elastic.waiting import BEGIN_SECONDS, Waiting
from ringcomm.elastic.world import World


def processes(hosts: str) -> list[Process]:
    """One process for each letter, on the host of that name."""
    return [Process(f"{host}{number}", host, number) for number, host in enumerate(hosts)]


def world(count: int, unit: int) -> tuple[Process, ...]:
    return units.in_units(processes("h" * count), unit)


def names(some: tuple[Process, ...] | list[Process]) -> str:
    return " ".join(process.uuid for process in some)


def test_founders_of_a_host_stand_together() -> None:
    founded = units.in_units(processes("abab"), 2)
    assert names(founded) == "a0 a2 b1 b3"
    assert [process.place for process in founded] == [0, 1, 0, 1]
    assert [process.unit for process in founded] == ["a0", "a0", "b1", "b1"]
    assert units.in_units(processes("ab"), 1) == tuple(processes("ab"))


@pytest.mark.parametrize("unit", [1, 2, 3, 4])
def test_a_whole_world_stays_as_it_is(unit: int) -> None:
    members = world(12, unit)
    assert units.arrange(members, unit) == (members, ())


def test_the_mates_of_a_dead_rank_wait() -> None:
    members = world(6, 2)
    stay, spare = units.arrange([*members[:2], *members[3:]], 2)
    assert names(stay) == "h0 h1 h4 h5"
    assert names(spare) == "h3"


def test_halves_that_fit_make_a_unit() -> None:
    members = world(6, 2)
    stay, spare = units.arrange([members[0], *members[3:]], 2)  # h0 had place 0, h3 place 1
    assert names(stay) == "h0 h3 h4 h5"
    assert not spare
    assert stay[0].unit == stay[1].unit == "h0"
    assert units.mates_of(stay[1], stay) == [0, 1]
    assert units.replicas_of(stay[1], stay) == [1, 3]
    stay, spare = units.arrange([members[0], members[2], *members[4:]], 2)  # both had place 0
    assert (names(stay), names(spare)) == ("h4 h5", "h0 h2")


def test_any_survivors_make_as_many_units_as_they_can() -> None:
    """Each unit has each place once, no rank is in two, and none waits that would complete one."""
    chance = random.Random(seed())
    for _ in range(2000):
        unit = chance.randint(2, 5)
        members: tuple[Process, ...] = world(unit * chance.randint(1, 5), unit)
        while members:
            alive = [process for process in members if chance.random() < 0.8]
            stay, spare = units.arrange(alive, unit)
            assert Counter(stay + spare).total() == len(alive)
            assert {p.uuid for p in (*stay, *spare)} == {p.uuid for p in alive}
            fewest = min(Counter([p.place for p in alive])[place] for place in range(unit))
            assert len(stay) == fewest * unit
            for _, mates in itertools.groupby(
                sorted(stay, key=lambda p: (p.unit, p.place)), key=lambda p: p.unit
            ):
                assert [process.place for process in mates] == list(range(unit))
            whole = {u for u, count in Counter(p.unit for p in alive).items() if count == unit}
            assert whole <= {process.unit for process in stay}
            assert units.arrange(stay, unit) == (stay, ())
            members = stay if chance.random() < 0.7 else ()


def test_guests_come_in_whole_units() -> None:
    some = [
        Process(name, "h", 1, place=place, ready=ready)
        for name, place, ready in [
            ("a", 1, True),
            ("b", 1, True),
            ("c", 0, False),
            ("d", 0, True),
            ("e", -1, True),
        ]
    ]
    assert names(units.complete(some, 2, 8)) == "d a"
    assert {process.unit for process in units.complete(some, 2, 8)} == {"d"}
    assert units.complete(some, 2, 1) == []
    assert names(units.complete(some, 1, 2)) == "a b"


def test_a_newcomer_gets_the_place_that_is_missing() -> None:
    some = processes("hhh")
    placed = [
        Process(p.uuid, "h", 1, place=place) for p, place in zip(some, (1, 0, 1), strict=True)
    ]
    assert units.place_for(placed, 2) == 0
    assert units.place_for([], 3) == 0
    assert units.place_for(placed, 3) == 2


def test_those_that_are_left_of_the_last_unit_are_completed() -> None:
    members = world(3, 3)
    left = [members[0], members[2]]
    assert units.are_broken(left, 3)
    assert not units.are_broken([*left, *world(3, 3)], 3)
    came = [Process(f"n{place}", "h", place, place=place) for place in (0, 1, 1, 2)]
    assert names(units.complete(came, 3, 8, left)) == "n1"
    assert names(units.complete(came, 3, 8, members)) == "n0 n1 n2"
    stay, spare = units.arrange([*left, came[1]], 3)
    assert (names(stay), spare) == ("h0 h2 n1", ())


def test_a_newcomer_gets_the_place_that_the_last_unit_lacks() -> None:
    keys, waiting = dist.HashStore(), Waiting(3, lambda: 0.0)
    members = world(3, 3)
    waiting.place(keys, [newcomer(1)], [members[0], members[2]])
    assert places(keys, 1) == [1]


@pytest.mark.parametrize(
    ("hosts", "held"),
    [
        ("ab", [1, 0]),
        ("aa", [1, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aaab", [3, 0, 1, 2]),
        ("aaa", [1, 2, 0]),
    ],
)
def test_copies_are_held_on_another_host(hosts: str, held: list[int]) -> None:
    assert units.holders(processes(hosts)) == held


def test_each_holds_one_copy_and_none_of_its_own() -> None:
    chance = random.Random(seed())
    for _ in range(2000):
        mates = processes("".join(chance.choices("abcd", k=chance.randint(2, 8))))
        held, hosts = units.holders(mates), [process.host for process in mates]
        assert sorted(held) == list(range(len(mates)))
        assert all(place != holder for place, holder in enumerate(held))
        away = sum(hosts[place] != hosts[holder] for place, holder in enumerate(held))
        largest = max(map(hosts.count, hosts))
        assert away == min(len(mates), 2 * (len(mates) - largest))


def hours() -> Callable[[], float]:
    """A clock in whose time nobody has to wait."""
    return partial(next, itertools.count(0.0, 3600.0))


def newcomer(number: int, rank: int = -1) -> Process:
    return Process(f"n{number}", "elsewhere", number, rank=rank, ready=False)


def places(keys: Any, *numbers: int) -> list[int]:
    return [int(keys.get(f"place/n{number}")) for number in numbers]


def test_a_newcomer_may_be_faster_than_the_mates_of_the_dead() -> None:
    """The mate has not asked yet, but the others know that it will."""
    keys, waiting = dist.HashStore(), Waiting(2)
    members = world(6, 2)
    waiting.meet(members[:2], [members[0]])
    waiting.place(keys, [newcomer(1)], members[2:])
    assert places(keys, 1) == [1]
    # A second one begins another unit, also when it asks another rank, which leads now; but not
    # at once: it may have come before the others know whom it has to complete.
    now = 10.0
    later = Waiting(2, lambda: now)
    later.place(keys, [newcomer(2)], members[2:])
    assert not keys.check(["place/n2"])
    now += BEGIN_SECONDS
    later.place(keys, [newcomer(2)], members[2:])
    assert places(keys, 2) == [0]


def test_one_that_came_before_the_death_was_known_completes_the_unit() -> None:
    keys, waiting = dist.HashStore(), Waiting(2, lambda: 0.0)
    members = world(4, 2)
    waiting.place(keys, [newcomer(1)], members)
    waiting.meet(members[:2], [members[0]])
    waiting.place(keys, [newcomer(1)], members[2:])
    assert places(keys, 1) == [1]


def test_one_that_entered_and_died_waits_for_nobody() -> None:
    """Also where the store still has it among those that wait, as it was told before."""
    keys, members = dist.HashStore(), world(4, 2)
    Waiting(2).place(keys, members[:2], members[2:])  # they wait to come in again
    waiting = Waiting(2, lambda: 0.0)
    waiting.meet(members, [members[0]])  # members[1] has died
    waiting.place(keys, [newcomer(1)], members[2:])
    assert places(keys, 1) == [1]


def test_newcomers_that_make_their_models_count() -> None:
    keys, waiting = dist.HashStore(), Waiting(3, hours())
    waiting.place(keys, [newcomer(1), newcomer(2)], world(3, 3))
    waiting.place(keys, [newcomer(3)], world(3, 3))
    assert places(keys, 1, 2, 3) == [0, 1, 2]
    waiting.place(keys, [newcomer(2)], world(3, 3))  # it asks once more
    assert places(keys, 2) == [1]


def test_one_that_was_started_anew_takes_its_place_again() -> None:
    keys, waiting = dist.HashStore(), Waiting(2, hours())
    waiting.place(keys, [newcomer(1, rank=7)], world(2, 2))
    waiting.place(keys, [newcomer(2, rank=7)], world(2, 2))
    assert places(keys, 1, 2) == [0, 0]


def test_one_that_was_started_anew_tells_that_the_mates_of_the_dead_will_wait() -> None:
    """The others do not know yet of the death, and another newcomer waits."""
    keys, waiting = dist.HashStore(), Waiting(2, hours())
    first, *others = world(4, 2)
    members = (replace(first, host="elsewhere", rank=7), *others)
    waiting.place(keys, [newcomer(1)], members)
    waiting.place(keys, [newcomer(2, rank=7)], members)
    assert places(keys, 1, 2) == [0, 0]


def test_members_wait_no_more() -> None:
    keys, waiting = dist.HashStore(), Waiting(2, hours())
    members = world(4, 2)
    waiting.meet(members[:2], [members[0]])
    waiting.place(keys, [newcomer(1)], members)
    assert places(keys, 1) == [0]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((0, 1, 4, None), "unit=0: from 1 to 8"),
        ((9, 1, 9, None), "unit=9: from 1 to 8"),
        ((2, 3, 4, None), "min_size=3 is no multiple of unit=2"),
        ((2, 1, 5, None), "start=5 is no multiple of unit=2"),
        ((4, 4, 8, 10), "max_size=10 is no multiple of unit=4"),
    ],
)
def test_sizes_that_are_no_multiples(sizes: tuple[int, int, int, int | None], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        units.check(*sizes)
    units.check(2, 1, 4, 6)


def test_units_need_a_torch_that_can_take_up_a_sharded_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.__version__", "2.12.1+cpu")
    with pytest.raises(ValueError, match=r"unit=2: units need torch 2.13 .* this is torch 2.12.1"):
        joining._groups(2, Options(), torch.device("cpu"))


def test_one_whose_unit_breaks_late_leaves_an_attempt() -> None:
    """While the members make their next group: it must not come back to this place as a guest."""
    changes: Any = SimpleNamespace(is_spare=False, commit=lambda: True, let_go=lambda: None)
    changes.regroup = lambda: setattr(changes, "is_spare", True)
    mine: Any = SimpleNamespace(_at=changes)
    calls: list[int] = []
    with pytest.raises(Evicted, match="was broken outside of a step"):
        World._repeat(mine, lambda: calls.append(1), None)
    assert calls == [1]
