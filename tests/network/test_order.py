"""The order of hosts along a ring, and their sites: arithmetic alone."""

from __future__ import annotations

import itertools
import random

import pytest

from ringcomm._network import order
from ringcomm._network.order import ALIKE, laid_out, length, ring_order, sites_of, slowest

Matrix = list[list[float]]


def symmetric(count: int, draw: random.Random, low: float, high: float) -> Matrix:
    matrix = [[0.0] * count for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        matrix[a][b] = matrix[b][a] = draw.uniform(low, high)
    return matrix


def inverse(rate: Matrix) -> Matrix:
    return [[1 / max(bandwidth, 1e-9) for bandwidth in row] for row in rate]


def quality(ring: list[int], latency: Matrix, rate: Matrix, best: float) -> tuple[bool, float]:
    """Whether a link is too slow, and how long the ring is: the less the better."""
    return slowest(ring, inverse(rate)) > ALIKE * best * (1 + 1e-12), length(ring, latency)


@pytest.mark.parametrize("count", range(1, 9))
def test_the_order_of_few_hosts_is_the_best_of_all(count: int) -> None:
    for seed in range(12 if count < 8 else 3):
        draw = random.Random(seed)
        latency, rate = symmetric(count, draw, 1e-5, 1e-2), symmetric(count, draw, 1e7, 1e9)
        ring = ring_order(latency, rate)
        assert sorted(ring) == list(range(count))
        assert ring[0] == 0
        every = [[0, *rest] for rest in itertools.permutations(range(1, count))]
        best = min(slowest(way, inverse(rate)) for way in every)
        least = min(quality(way, latency, rate, best) for way in every)
        assert quality(ring, latency, rate, best) == pytest.approx(least)


def test_ten_hosts_are_exact_and_more_are_close_to_that(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        draw = random.Random(seed)
        latency, rate = symmetric(10, draw, 1e-5, 1e-2), symmetric(10, draw, 1e8, 1.05e8)
        exact = length(ring_order(latency, rate), latency)
        with monkeypatch.context() as patch:
            patch.setattr(order, "EXACT", 3)
            improved = length(ring_order(latency, rate), latency)
        assert exact <= improved * (1 + 1e-12) < 1.4 * exact


@pytest.mark.parametrize("count", [11, 16, 33])
def test_many_hosts_are_never_worse_than_as_given(count: int) -> None:
    for seed in range(8):
        draw = random.Random(seed)
        latency, rate = symmetric(count, draw, 1e-5, 1e-2), symmetric(count, draw, 1e7, 1e9)
        ring = ring_order(latency, rate)
        assert sorted(ring) == list(range(count))
        assert ring == ring_order(latency, rate)
        given, slow = list(range(count)), inverse(rate)
        best = min(slowest(ring, slow), slowest(given, slow))
        assert quality(ring, latency, rate, best) <= quality(given, latency, rate, best)
        alike = symmetric(count, draw, 1e9, 1.05e9)
        assert length(ring_order(latency, alike), latency) < length(given, latency)


def test_a_slow_link_is_left_out_though_it_is_short() -> None:
    for count in (5, 12):
        latency = [[1e-3 * (abs(a - b) > 0) for b in range(count)] for a in range(count)]
        rate = [[1e9 for _ in range(count)] for _ in range(count)]
        latency[1][2] = latency[2][1] = 1e-6
        rate[1][2] = rate[2][1] = 1e7
        ring = ring_order(latency, rate)
        assert abs(ring.index(1) - ring.index(2)) not in (1, count - 1)
        rate[1][2] = rate[2][1] = 0.95e9  # alike
        ring = ring_order(latency, rate)
        assert abs(ring.index(1) - ring.index(2)) in (1, count - 1)


def test_interleaved_sites_are_put_side_by_side() -> None:
    for count in (8, 14):
        latency = distances([host % 2 for host in range(count)], 1e-4, 1e-2)
        rate = [[1e8 for _ in range(count)] for _ in range(count)]
        along = laid_out(latency, rate)
        assert [site for _, site in along] == [0] * (count // 2) + [1] * (count // 2)
        assert [host % 2 for host, _ in along] == [site for _, site in along]


def distances(place: list[int], near: float, far: float) -> Matrix:
    """Latencies where hosts with equal numbers are near one another."""
    return [
        [0.0 if a == b else near if place[a] == place[b] else far for b in range(len(place))]
        for a in range(len(place))
    ]


@pytest.mark.parametrize(
    ("place", "near", "far", "sites"),
    [
        ([0, 0, 1, 1], 1, 10, [0, 0, 1, 1]),  # exactly a tenth
        ([0, 0, 1, 1], 1, 9.9, [0, 1, 2, 3]),
        ([0, 1, 0, 1, 1], 1, 50, [0, 1, 0, 1, 1]),
        ([0, 0, 0], 1, 1, [0, 1, 2]),  # all together are no site
        ([0, 0, 1], 0, 1, [0, 0, 1]),
        ([0], 1, 1, [0]),
        ([0, 1], 1, 1, [0, 1]),
    ],
)
def test_a_site_is_ten_times_nearer(
    place: list[int], near: float, far: float, sites: list[int]
) -> None:
    assert sites_of(distances(place, near, far)) == sites


def test_a_chain_of_hosts_is_no_site() -> None:
    """Each is near the next, but the ends are far apart."""
    chain = [[float(abs(a - b)) for b in range(6)] for a in range(6)]
    assert sites_of(chain) == [0, 1, 2, 3, 4, 5]
    far = [[*row, 100.0] for row in chain] + [[100.0] * 6 + [0.0]]
    assert sites_of(far) == [0, 0, 0, 0, 0, 0, 1]


def test_the_largest_sites_count() -> None:
    """Racks of two, in halls of two racks, in two cities."""
    latency = [
        [0.0 if a == b else [1e-5, 2e-4, 5e-3][(a // 2 != b // 2) + (a // 4 != b // 4)]
         for b in range(8)]
        for a in range(8)
    ]  # fmt: skip
    assert sites_of(latency) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert sites_of([row[:4] for row in latency[:4]]) == [0, 0, 1, 1]


def test_two_hundred_hosts_take_little_time() -> None:
    draw = random.Random(0)
    latency, rate = symmetric(200, draw, 1e-5, 1e-2), symmetric(200, draw, 1e8, 1e9)
    ring = laid_out(latency, rate)
    assert sorted(host for host, _ in ring) == list(range(200))
