"""DiLoCo between sites of several ranks: DDP inside a site, rounds between them."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from lab.course import starters
from lab.limits import limit
from lab.trainee import CLASSES, FEATURES, Log, digest
from ringcomm import elastic
from ringcomm.elastic.outer import Contribution

DIES, GROWS, ENDS, EVERY = 3, 5, 8, 4  # rounds, and inner steps of one
NUMBERS = 32 * (FEATURES + 1) + CLASSES * 33  # of the model


def parts(world: elastic.World, seed: int) -> tuple[Any, Any, Any]:
    """A model in DDP over the site, another one on each rank, and its optimizers."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    model = DDP(net, process_group=world.mesh["shard"].get_group(), init_sync=False)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return model, inner, torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(world: elastic.World, log: Log, place: str, options: dict[str, Any]) -> None:
    """Train until round `ENDS`; the process with number 1 dies in an inner step, or in a round."""
    number = int(os.environ["RANK"])
    model, inner, outer_opt = parts(world, number)
    outer = world.outer(model, inner, outer_opt, every=EVERY, **options)
    average = outer._average

    def averaging(mine: Any, data: Any) -> Any:
        if number == 1 and place == "round" and world.step_number == DIES:
            die()
        return average(mine, data)

    outer._average = averaging  # type: ignore[method-assign]
    draw = torch.Generator().manual_seed(number)
    log("tracked", rounds=outer.rounds, own=digest(model.parameters()), size=world.size)
    while outer.rounds < ENDS:
        before = outer.rounds
        if (before, number, world.size) == (GROWS, 2, 2):  # the first of those that are left
            await_guests(world)
        with outer.step():
            x = torch.randn(8, FEATURES, generator=draw)
            inner.zero_grad()
            loss = F.cross_entropy(model(x), x[:, :CLASSES].argmax(1))
            if number == 1 and place == "inner" and before == DIES and outer.steps % EVERY == 2:
                loss.register_hook(die)
            loss.backward()
            inner.step()
        if outer.rounds > before:
            own, state = digest(model.parameters()), digest(outer.model.parameters())
            log("step", step=outer.rounds, size=world.size, digest=state, own=own)
    log("end", rounds=outer.rounds, digest=digest(outer.model.parameters()))


def await_guests(world: elastic.World) -> None:
    deadline = time.monotonic() + limit(60)
    while not world._at.watch.wants_change and world.size == 2:
        assert time.monotonic() < deadline, "no guests have come"
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("inner", {"bits": 8}),
        ("round", {"fragments": 2}),
        pytest.param("inner", {"fragments": 2, "bits": 4}, marks=pytest.mark.slow),
        pytest.param("round", {"bits": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_death_costs_a_site_and_no_round(place: str, options: dict[str, Any]) -> None:
    """The other site goes on, and the dead one's mate comes in again with a new process."""
    program = partial(train, place=place, options=options)
    with starters(4, program, unit=2) as some:
        some.await_events([0, 1, 2, 3], "tracked")
        some.processes[1].join(limit(60))
        assert some.processes[1].exitcode == -signal.SIGKILL
        some.start(1)
        ends = some.await_ends([0, 2, 3, 4], 120)
        assert [end["what"] for end in ends] == ["end"] * 4, ends
        assert {(end["rounds"], end["digest"]) for end in ends} == {(ENDS, ends[0]["digest"])}
        some.check_equal()
        for number in (2, 3):
            steps = some.events(number, "step")
            assert [event["step"] for event in steps] == list(range(1, ENDS + 1))
            sizes = [event["size"] for event in steps]
            assert sizes[:DIES] == [4] * DIES
            assert sizes[DIES] == 2
            assert sizes[-1] == 4
        for event in some.all_events("step"):
            whole = "fragments" not in options
            assert not whole or event["own"] == event["digest"], "it has what the round led to"
        check_mates(some, [(0, 1), (2, 3)], DIES)
        check_mates(some, [(0, 4), (2, 3)], ENDS)


def check_mates(some: Any, sites: list[tuple[int, int]], step: int) -> None:
    """Require that all ranks of a site had the same parameters after a round."""
    for mates in sites:
        events = [e for n in mates for e in some.events(n, "step") if e["step"] == step]
        assert len(events) == 2
        assert events[0]["own"] == events[1]["own"]


def average(world: elastic.World, log: Log, bits: int) -> None:
    """Bring other numbers than the other site, which made a third of the steps."""
    outer = world.outer(*parts(world, world.rank), every=1, bits=bits)
    site = world.rank // 2
    moved = torch.arange(NUMBERS, dtype=torch.float32) % 7 + 8 * site
    mine = Contribution(0, [3, 1][site], moved)
    mean = world.attempt(lambda: outer._average(mine, outer._encode(mine)))
    assert mean is not None
    log("end", mean=mean.tolist(), sent=outer._encode(mine).nbytes)


@pytest.mark.parametrize("bits", [32, 8])
def test_each_rank_sends_its_share(bits: int) -> None:
    """And all get the mean of the sites, weighted by their steps."""
    expected = (torch.arange(NUMBERS) % 7 + 2.0).tolist()
    with starters(4, partial(average, bits=bits), unit=2) as some:
        for end in some.await_ends([0, 1, 2, 3]):
            assert end["mean"] == pytest.approx(expected, abs=0.1 if bits == 8 else 1e-5)
            assert end["sent"] < 1.3 * NUMBERS / 2 * bits / 8


def refused(world: elastic.World, log: Log) -> None:
    model, inner, outer_opt = parts(world, 0)
    with pytest.raises(ValueError, match="makes no inner steps during a round"):
        world.outer(model, inner, outer_opt, every=4, delay=2)
    with pytest.raises(TypeError, match="trains by DDP over its own group"):
        world.outer(model.module, inner, outer_opt, every=4)
    world.outer(model, inner, outer_opt, every=4)
    loss = model(torch.ones(1, FEATURES)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"in `with outer.step\(\):`"):
        inner.step()
    log("end")


def test_what_sites_of_several_ranks_cannot_do() -> None:
    with starters(2, refused, unit=2) as some:
        some.await_ends([0, 1])
