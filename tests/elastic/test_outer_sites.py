"""DiLoCo between sites, which are network namespaces: cuts, refusals and deaths cost no round."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lab.limits import limit
from lab.namespaces import missing
from lab.site import Site, site
from lab.trainee import CLASSES, FEATURES, Log, Plan, digest, enter

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("hosts"),
    pytest.mark.timeout(400),
]


def train(plan: Plan, log: Log) -> None:
    """Make rounds of 0.2 s, one fragment after another, for ever."""
    world = enter(plan, log)
    net = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
    outer_opt = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    every = timedelta(seconds=0.4)
    outer = world.outer(net, inner, outer_opt, every=every, bits=4, fragments=2)
    log("tracked", rounds=outer.rounds)
    draw = torch.Generator().manual_seed(plan.number)
    while True:
        before = outer.rounds
        time.sleep(0.005)
        x = torch.randn(8, FEATURES, generator=draw)
        inner.zero_grad()
        F.cross_entropy(net(x), x[:, :CLASSES].argmax(1)).backward()
        inner.step()
        if outer.rounds > before:
            state = digest(outer.model.parameters())
            log("step", step=outer.rounds, size=world.size, digest=state)


def await_rounds(place: Site, numbers: list[int], more: int = 3) -> None:
    """Wait until each of them has made so many rounds from now on."""
    at = time.monotonic()
    deadline = at + limit(60)
    while not all(len(place.steps_after(number, at)) >= more for number in numbers):
        assert time.monotonic() < deadline, "rounds do not go on"
        time.sleep(0.02)


def test_no_round_is_lost(tmp_path: Path) -> None:
    """Sites are cut off for a moment, refuse for a moment, die, and come back."""
    with site(3, tmp_path, 0, train, pause=0.0) as place:
        first, second, third = numbers = place.start(0, 1, 2)
        place.hosts.cut(1)
        time.sleep(1.0)
        place.hosts.heal(1)
        await_rounds(place, numbers)
        place.hosts.reject(2, 0.3)
        await_rounds(place, numbers)
        assert not [e for n in numbers for e in place.trainees.events(n, "step") if e["size"] != 3]
        place.trainees.kill(second)
        place.await_size([first, third], 2, 20)
        (again,) = place.trainees.start(1, namespace=place.hosts.namespaces[1], start=3)
        place.await_size([first, third, again], 3, 60)
        place.trainees.check_equal()
        for number in (first, third):
            rounds = [event["step"] for event in place.trainees.events(number, "step")]
            assert rounds == list(range(1, len(rounds) + 1))
