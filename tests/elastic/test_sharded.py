"""Sharded training in units: a death drops its unit, the mates wait, others complete it again."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lab.course import Starters, starters
from lab.limits import limit, seed
from lab.sharded import KINDS, Part, by_epochs, churn, model_of, train
from lab.trainee import Log
from lab.trainees import Event
from ringcomm import elastic
from ringcomm.elastic import joining, journal
from ringcomm.elastic.promises import judge

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < joining.OLDEST,
    reason="units need torch 2.13: see tests/elastic/test_units.py",
)

AT, GROWS, STEPS = 4, 7, 10


def steps(some: Starters) -> dict[int, dict[int, set[str]]]:
    """Return the digests of each step, by place; equal shards have one."""
    told: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for event in some.all_events("step"):
        told[event["step"]][event["place"]].add(event["digest"])
    return told


def check_steps(some: Starters, unit: int = 2, last: int = STEPS) -> dict[int, dict[int, set[str]]]:
    """Require that each step was applied, to each shard, with equal bits on all that hold it."""
    told = steps(some)
    assert sorted(told) == list(range(1, last + 1))
    for step, places in told.items():
        assert sorted(places) == list(range(unit)), (step, places)
        assert all(len(digests) == 1 for digests in places.values()), (step, places)
    return told


def check_samples(some: Starters, per_unit: bool) -> None:
    """Require that no sample of the first permutation was used twice."""
    used: dict[int, set[tuple[int, Any]]] = defaultdict(set)
    for number in range(len(some.processes)):
        for event in some.events(number, "step"):
            for sample in event["samples"]:
                used[sample].add((event["step"], tuple(event["samples"]) if per_unit else number))
    assert used
    assert all(len(uses) == 1 for uses in used.values()), used


def last_words(some: Starters, numbers: list[int]) -> list[Event]:
    """Wait for the ends of processes, of which some may raise an error; return what they wrote."""
    for number in numbers:
        some.processes[number].join(limit(60))
    return [some.events(number)[-1] for number in numbers]


@functools.cache
def planned(kind: str, leaves: tuple[int, ...], at: int) -> dict[int, dict[int, set[str]]]:
    """Return the digests of a run in which a unit leaves as planned, and nobody comes."""
    part = Part(kind, STEPS, leaves=leaves, at=at)
    with starters(4, partial(train, part=part), unit=2) as some:
        ends = some.await_ends([n for n in range(4) if n not in leaves])
        assert [end["what"] for end in ends] == ["end"] * 2, ends
        return {step: {k: set(v) for k, v in told.items()} for step, told in steps(some).items()}


@pytest.mark.parametrize(
    ("kind", "place", "dies"),
    [
        *[("shard", place, 1) for place in ("forward", "backward", "between", "end")],
        ("shard", "backward", 2),
        ("both", "backward", 0),
        pytest.param("both", "end", 3, marks=pytest.mark.slow),
        ("tensor", "backward", 3),
        pytest.param("tensor", "end", 0, marks=pytest.mark.slow),
    ],
)
def test_a_death_drops_its_unit_until_another_comes(kind: str, place: str, dies: int) -> None:
    part = Part(kind, STEPS, dies, place, at=AT, grows=GROWS)
    mate = dies ^ 1
    with starters(4, partial(train, part=part), unit=2) as some:
        some.processes[dies].join(limit(60))
        (joiner,) = some.start()
        alive = [number for number in range(4) if number != dies]
        ends = some.await_ends([*alive, joiner])
        assert [end["what"] for end in ends] == ["end"] * 4, ends
        assert [end["size"] for end in ends] == [4] * 4
        told = check_steps(some)
        check_samples(some, kind == "tensor")
        assert [c["size"] for c in some.events(alive[-1 if dies < 2 else 0], "change")] == [2, 4]
        # Its mate is no member meanwhile, and is one again, with the steps that it has missed.
        missed = set(range(AT + 2, GROWS + 1))
        assert missed.isdisjoint(event["step"] for event in some.events(mate, "step"))
        (tracked,) = some.events(joiner, "tracked")
        assert (tracked["place"], tracked["step"] > AT) == (dies % 2, True)
    # Survivors that all hold their gradients have voted for the step: it counts.
    leaves, counts = (dies, mate), place in ("between", "end")
    expected = planned(kind, leaves, AT + 1 if counts else AT)
    assert {step: told[step] for step in range(1, GROWS)} == {
        step: expected[step] for step in range(1, GROWS)
    }


def test_one_that_waits_over_epochs_ends_with_the_others() -> None:
    program = partial(by_epochs, dies=1, at=5, grows=95, epochs=4)
    with starters(4, program, unit=2) as some:
        some.await_events([2], "epoch", count=2)
        (joiner,) = some.start()
        ends = some.await_ends([0, 2, 3, joiner])
        assert [end["what"] for end in ends] == ["end"] * 4, ends
        assert len({(end["step"], end["epoch"]) for end in ends}) == 1, ends
        first, second = (event["step"] for event in some.events(2, "epoch")[:2])
        assert second - first == 40  # of 2 ranks with 4 samples each
        told = [(event["mine"], event["step"]) for event in some.events(0, "epoch")]
        assert [mine for mine, _ in told] == [0, 1, 2, 3]
        assert told[2:] == [(e["mine"], e["step"]) for e in some.events(2, "epoch")][2:]


def test_a_rank_that_waits_leaves_at_once() -> None:
    with starters(4, partial(churn, kind="shard"), unit=2) as some:
        some.await_events([0, 1, 2, 3], "step", count=2)
        some.kill(1)
        some.await_events([2], "change")
        some.kill(0, signal.SIGTERM)
        some.processes[0].join(limit(20))
        assert some.processes[0].exitcode == 0
        assert some.processes[2].exitcode is None


def test_the_example(tmp_path: Path) -> None:
    """examples/elastic_sharded.py: one is killed, another one comes, and promises are kept."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = Path(__file__).parents[2] / "examples" / "elastic_sharded.py"
    command = [sys.executable, str(script), "--epochs", "12", "--pause", "0.02"]
    env = {**os.environ, "RINGCOMM_ELASTIC": f"127.0.0.1:{store.port}", "OMP_NUM_THREADS": "1"}
    env["RINGCOMM_ELASTIC_JOURNAL"] = str(tmp_path)
    said = tmp_path / "said"

    def start() -> subprocess.Popen[bytes]:
        with said.open("ab") as file:
            return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)

    processes = [start() for _ in range(4)]
    try:
        deadline = time.monotonic() + limit(60)
        while (
            len(steps := [line for line in journal.read(tmp_path) if line["what"] == "step"]) < 40
        ):
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        pid = steps[-1]["pid"]
        os.kill(pid, signal.SIGKILL)
        killed = {"at": time.monotonic(), "what": "kill", "pid": pid}
        (tmp_path / "killed.jsonl").write_text(json.dumps(killed) + "\n")
        processes.append(start())
        codes = [process.wait(limit(120)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert sorted(codes) == [-9, 0, 0, 0, 0], said.read_text()
    assert "ranks=4" in said.read_text()
    assert judge(journal.read(tmp_path)).broken == []


def test_halves_of_two_units_go_on_as_one(tmp_path: Path) -> None:
    """Shards are equal in all units, so those that are left of two broken ones make one."""
    gate = tmp_path / "gate"
    part = Part("both", STEPS, at=STEPS - 1, gate=str(gate), pause=0.05)
    with starters(6, partial(train, part=part), unit=2) as some:
        for number in range(6):
            some.await_events([number], "step", count=2)
        for number in (0, 3):
            some.kill(number)
        gate.touch()
        ends = some.await_ends([1, 2, 4, 5])
        assert [end["what"] for end in ends] == ["end"] * 4, ends
        check_steps(some)
        assert {some.events(number, "change")[-1]["size"] for number in (1, 2, 4, 5)} == {4}


def test_a_world_without_a_whole_unit_says_which_shards_are_left() -> None:
    part = Part("shard", 1000, pause=0.02)
    with starters(4, partial(train, part=part), unit=2) as some:
        for number in range(4):
            some.await_events([number], "step", count=2)
        for number in (0, 2):
            some.kill(number)
        ends = last_words(some, [1, 3])
    assert [end["kind"] for end in ends] == ["TooFew"] * 2, ends
    assert (
        "no unit of 2 ranks is whole: the ranks that are left hold only shard 1"
        in (ends[0]["text"])
    )


def test_all_shards_of_a_checkpoint_are_of_one_step(tmp_path: Path) -> None:
    part = Part("shard", 1000, checkpoints=str(tmp_path), pause=0.02, waits=True, drops=0.0)
    with starters(4, partial(train, part=part), unit=2) as some:
        for number in range(4):
            some.await_events([number], "step", count=9)
        for number in range(4):
            some.kill(number)
        before = steps(some)
    newest = {
        place: max(int(p.name[5:]) for p in (tmp_path / f"shard-{place}-of-2").glob("step-*"))
        for place in (0, 1)
    }
    part = Part("shard", min(newest.values()) + 2, checkpoints=str(tmp_path), drops=0.0)
    with starters(4, partial(train, part=part), unit=2) as some:
        ends = some.await_ends([0, 1, 2, 3])
        assert [end["what"] for end in ends] == ["end"] * 4, ends
        told = steps(some)
    assert min(told) == min(newest.values()) + 1
    both = set(told) & set(before)
    assert both or max(before) == min(newest.values())
    assert all(told[step] == before[step] for step in both)


def test_a_shard_without_a_checkpoint_is_no_new_beginning(tmp_path: Path) -> None:
    part = Part("shard", 5, checkpoints=str(tmp_path))
    with starters(2, partial(train, part=part), unit=2) as some:
        some.await_ends([0, 1])
    shutil.rmtree(tmp_path / "shard-1-of-2")
    with starters(2, partial(train, part=part), unit=2) as some:
        ends = last_words(some, [0, 1])
    for end in ends:
        assert end["what"] == "raised", ends
        assert "of shard 1 there is none of the same step" in end["text"]


def refused(world: elastic.World, log: Log) -> None:
    """Say how the world answers to what it cannot take, then end."""
    mesh = world.mesh
    net = nn.Linear(4, 4)
    sharded, _ = model_of(world, "shard")
    other, _ = model_of(world, "shard")
    elsewhere = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    makers: dict[str, Callable[[], Any]] = {
        "plain": lambda: net,
        "ddp": lambda: DistributedDataParallel(net),
        "elsewhere": lambda: elsewhere,
    }
    for name, make in makers.items():
        try:
            world.track(net=make())
        except Exception as error:  # noqa: BLE001 - it is the result
            log(name, kind=type(error).__name__, text=str(error))
    world.track(net=sharded)
    try:
        world.checkpoint("nowhere", every=timedelta(minutes=1))
    except ValueError as error:
        log("times", text=str(error))
    log("end", same=world.mesh is mesh, shape=list(mesh.shape), other=other is not sharded)


def test_refused() -> None:
    with starters(2, refused, unit=2) as some:
        ends = some.await_ends([0, 1])
        assert [(end["what"], end.get("same"), end.get("shape")) for end in ends] == [
            ("end", True, [1, 2])
        ] * 2, ends
        assert (
            "'net' is not sharded, in a world of units of 2" in some.events(0, "plain")[0]["text"]
        )
        assert "every=0:01:00: give steps" in some.events(0, "times")[0]["text"]
        assert "'net' is not sharded, in a world of units of 2" in some.events(0, "ddp")[0]["text"]
        assert (
            "'net' is sharded over another mesh than world.mesh"
            in (some.events(0, "elsewhere")[0]["text"])
        )


def test_sharded_models_need_units() -> None:
    with starters(2, without_units) as some:
        ends = last_words(some, [0, 1])
    for end in ends:
        assert end["what"] == "raised", ends
        assert "tell elastic.join(unit=...) how many ranks hold a copy" in end["text"]


def without_units(world: elastic.World, log: Log) -> None:
    net = nn.Linear(4, 4)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    world.track(net=net)


def broken_in_an_attempt(world: elastic.World, log: Log) -> None:
    net, _ = model_of(world, "shard")
    world.track(net=net)
    rank = world.rank

    def validate() -> float:
        log("validates")
        if rank == 0:
            time.sleep(limit(60))
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return float(value.item())

    log("end", value=world.attempt(validate))


def test_a_unit_that_breaks_in_an_attempt_has_no_place_to_come_back_to() -> None:
    with starters(4, broken_in_an_attempt, unit=2) as some:
        some.await_events([0], "validates")
        some.kill(0)
        ends = last_words(some, [1, 2, 3])
    assert [end["what"] for end in ends] == ["raised", "end", "end"], ends
    assert "this rank's unit was broken outside of a step" in ends[0]["text"]
    assert [end["value"] for end in ends[1:]] == [2.0, 2.0]


def alive_in(some: Starters) -> list[int]:
    return [number for number, process in enumerate(some.processes) if process.exitcode is None]


def disturb(some: Starters, chance: random.Random) -> None:
    """Have one end, while all units are whole, and maybe those that come in its place."""
    some.kill(chance.choice(alive_in(some)), chance.choice([signal.SIGKILL, signal.SIGTERM]))
    (new,) = some.start()
    while chance.random() < 0.3:
        time.sleep(chance.uniform(0, 1.5))
        some.kill(new)
        (new,) = some.start()
    counts = {number: len(some.events(number, "step")) for number in alive_in(some)}
    some.await_events([new], "step", count=chance.randint(1, 40))
    deadline = time.monotonic() + limit(60)
    while not all(len(some.events(n, "step")) > counts[n] for n in alive_in(some) if n in counts):
        assert time.monotonic() < deadline, "not all have come back"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "replicas", "unit"),
    [*[(kind, 2, 2) for kind in KINDS], ("both", 3, 2), ("plain", 4, 1)],
)
@pytest.mark.parametrize("seconds", [20, pytest.param(240, marks=pytest.mark.soak)])
def test_churn(kind: str, replicas: int, unit: int, seconds: float) -> None:
    """Ranks die, leave and come for so long; no step is lost, and no shard differs."""
    chance, until = random.Random(seed()), time.time() + seconds
    program = partial(churn, kind=kind)
    with starters(replicas * unit, program, unit=unit, joining=300.0) as some:
        some.await_events(list(range(replicas * unit)), "step", count=2)
        changes = 0
        while time.time() < until:
            disturb(some, chance)
            changes += 1
        told = steps(some)
        assert changes > 1
        assert sorted(told) == list(range(1, max(told) + 1))
        apart = {step: p for step, p in told.items() if any(len(d) > 1 for d in p.values())}
        assert not apart, (sorted(apart)[:5], some.all_events("change"))
