"""DiLoCo between sites, which are network namespaces: cuts, refusals and deaths cost no round."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from conftest import forms
from torch import nn

from lab.limits import claim, limit
from lab.namespaces import missing
from lab.site import Site, site
from lab.trainee import CLASSES, FEATURES, Log, Plan, digest, enter
from lab.wan import Wan

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("hosts"),
    pytest.mark.timeout(400),
]

FAR = Wan(rate=100, delay=100)


def train(plan: Plan, log: Log) -> None:
    """Make rounds of 0.2 s, one fragment after another, for ever."""
    world = enter(plan, log)
    net = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
    outer_opt = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    every = timedelta(seconds=0.4)
    outer = world.outer(net, inner, outer_opt, every=every, bits=4, fragments=2)
    log("tracked", rounds=outer.rounds)
    draw, began, first = torch.Generator().manual_seed(plan.number), time.monotonic(), outer.waited
    while True:
        before = outer.rounds
        time.sleep(0.005)
        x = torch.randn(8, FEATURES, generator=draw)
        inner.zero_grad()
        F.cross_entropy(net(x), x[:, :CLASSES].argmax(1)).backward()
        inner.step()
        if outer.rounds > before:
            state = digest(outer.model.parameters())
            times = {"waited": outer.waited - first, "seconds": time.monotonic() - began}
            log("step", step=outer.rounds, size=world.size, digest=state, **times)


def await_rounds(place: Site, numbers: list[int], more: int = 3) -> None:
    """Wait until each of them has made so many rounds from now on."""
    at = time.monotonic()
    deadline = at + limit(60)
    while not all(len(place.steps_after(number, at)) >= more for number in numbers):
        assert time.monotonic() < deadline, "rounds do not go on"
        time.sleep(0.02)


@pytest.mark.parametrize(("count", "far"), forms([(3, None), (2, FAR), (3, FAR)], (3, None)))
def test_no_round_is_lost(tmp_path: Path, count: int, far: Wan | None) -> None:
    """Sites are cut off for a moment, refuse for a moment, die, and come back."""
    with site(count, tmp_path, 0, train, far, pause=0.0) as place:
        numbers = place.start(*range(count))
        second = numbers[1]
        place.hosts.cut(1)
        time.sleep(1.0)
        place.hosts.heal(1)
        await_rounds(place, numbers)
        place.hosts.reject(count - 1, 0.3)
        await_rounds(place, numbers)
        events = [e for n in numbers for e in place.trainees.events(n, "step")]
        assert {event["size"] for event in events} == {count}
        place.trainees.kill(second)
        left = [number for number in numbers if number != second]
        place.await_size(left, count - 1, 20)
        (again,) = place.trainees.start(1, namespace=place.hosts.namespaces[1], start=count)
        place.await_size([*left, again], count, 60)
        place.trainees.check_equal()
        for number in left:
            events = place.trainees.events(number, "step")
            assert [event["step"] for event in events] == list(range(1, len(events) + 1))
            last = events[-1]
            assert far is None or last["waited"] / last["seconds"] < claim(0.05), last
            print(f"site {number}: {last['waited']:.2f} s of {last['seconds']:.1f} s waited")
