"""Ranks that leave in good order, and worlds that are lost as a whole and start again."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from lab.course import starters
from lab.limits import limit
from lab.trainee import SAMPLES, Log
from lab.trainees import Event, Trainees, trainees
from ringcomm import elastic
from ringcomm.elastic.checkpoint import Checkpoints

EVERY = 5  # steps, between the checkpoints of a trainee


def newest(folder: Path) -> int:
    """The step of the newest whole checkpoint."""
    checkpoint = Checkpoints(folder, every=1, log=lambda text: None).newest()
    return checkpoint.step if checkpoint else 0


def check_nothing_again(some: Trainees, numbers: list[int]) -> None:
    """Require that they computed no step twice."""
    for end in some.await_ends(numbers):
        assert end["stats"]["aborted"] == 0, end


@pytest.mark.parametrize("leaver", [0, 1])
def test_leave(leaver: int) -> None:
    with trainees(3, epochs=1, leaves=((leaver, 5),)) as some:
        ends = some.await_ends([0, 1, 2])
        assert [end["step"] for end in ends].count(5) == 1
        assert ends[leaver]["step"] == 5
        check_nothing_again(some, [0, 1, 2])
        some.check_equal()
        some.check_ledger(epochs=1)
        left = some.processes[leaver].pid
        for change in some.all_events("change"):
            assert (change["step"], change["lost"]) == (5, [left])


def test_signal() -> None:
    """SIGTERM, as schedulers send it, comes at any time; the last one leaves alone."""
    with trainees(3, epochs=10**6) as some:
        for number in (1, 0, 2):
            some.await_events([2], "step", 5)
            some.kill(number, signal.SIGTERM)
            some.await_ends([number])
        check_nothing_again(some, [0, 1, 2])
        some.check_equal()
        some.check_ledger()


@pytest.mark.parametrize("leaves", [((0, 7), (1, 7), (2, 7)), ((0, 4), (1, 7), (2, 8))])
def test_last_writes_checkpoint(tmp_path: Path, leaves: tuple[tuple[int, int], ...]) -> None:
    """Also if all of them leave with the same step."""
    with trainees(3, epochs=10**6, leaves=leaves, folder=str(tmp_path)) as some:
        some.await_ends([0, 1, 2])
        assert newest(tmp_path) == max(step for _, step in leaves)


def test_signal_to_all(tmp_path: Path) -> None:
    """As when a job is ended: they leave with the same step, or one soon after the other."""
    with trainees(3, epochs=10**6, folder=str(tmp_path)) as some:
        some.await_events([0, 1, 2], "step", 3)
        for number in range(3):
            some.kill(number, signal.SIGTERM)
        ends = some.await_ends([0, 1, 2])
        assert newest(tmp_path) == max(end["step"] for end in ends)
        some.check_ledger()


def lose_all(some: Trainees, folder: Path) -> None:
    """Kill all ranks of a world that has written two checkpoints."""
    deadline = time.monotonic() + limit(30)
    while len(list(folder.glob("step-*"))) < 2:
        assert time.monotonic() < deadline, some.all_events()[-10:]
        time.sleep(0.01)
    for number in (0, 1):
        some.kill(number)
    for number in (0, 1):
        some.processes[number].join(limit(10))


def used(events: list[Event], low: int, high: int) -> list[int]:
    """The batches that were used when more than `low` batches were decided, at most `high`."""
    steps = {e["decided"]: e["batches"] for e in events if low < e["decided"] <= high}
    return [batch for batches in steps.values() for batch in batches]


@pytest.mark.parametrize("torn", [False, True])
def test_total_loss(tmp_path: Path, torn: bool) -> None:
    """Others start on the same store, and go on from the newest whole checkpoint."""
    folder, errors = tmp_path / "checkpoints", tmp_path / "errors"
    with trainees(2, epochs=10**6, folder=str(folder)) as some:
        lose_all(some, folder)
        kept = sorted(folder.glob("step-*"))
        step, damaged = newest(folder), kept[-1]
        assert step == int(damaged.name.split("-")[1])
        if torn:
            data = next(damaged.glob("*.distcp"))
            data.write_bytes(data.read_bytes()[:-100])
            step = int(kept[-2].name.split("-")[1])
        epochs = 2 * step * some.plan.batch // SAMPLES + 2
        some.start(2, errors=str(errors), epochs=epochs)
        some.await_ends([2, 3])
        assert [some.events(n, "tracked")[0]["step"] for n in (2, 3)] == [step, step]
        text = errors.read_text()
        assert f"goes on from checkpoint {folder}/step-{step:09d}, step {step}" in text
        assert (f"checkpoint {damaged} is passed over" in text) == torn
        lives = [[*some.events(a, "used"), *some.events(b, "used")] for a, b in ((0, 1), (2, 3))]
        border = 2 * step  # each step took a batch of each rank
        last = max(event["decided"] for event in lives[1])
        assert min(event["decided"] for event in lives[1]) == border + 2
        batches = used(lives[0], 0, border) + used(lives[1], border, last)
        assert sorted(batches) == list(range(len(batches)))
        assert len(batches) * some.plan.batch >= epochs * SAMPLES


def load_own(world: elastic.World, log: Log, folder: Path) -> None:
    """Each rank has a folder of its own, as on a disk of its host."""
    net = torch.nn.Linear(2, 2, bias=False)
    world.track(net=net)
    world.checkpoint(folder / os.environ["RANK"], every=1000)
    log("end", step=world.step_number, weight=net.weight.tolist())


@pytest.mark.parametrize(
    ("steps", "damaged", "loads"),
    [
        ([[5], [9]], [], 9),
        ([[5, 12], [9]], [(0, 12)], 9),
        ([[5, 12], [3, 9]], [(0, 12), (1, 9)], 5),
        ([[], [3]], [], 3),
    ],
)
def test_the_newest_of_all_disks_is_loaded(
    tmp_path: Path, steps: list[list[int]], damaged: list[tuple[int, int]], loads: int
) -> None:
    for rank, of_rank in enumerate(steps):
        for step in of_rank:
            made = Checkpoints(tmp_path / str(rank), every=1)
            made.save(step, {"net": {"weight": torch.full((2, 2), float(step))}}, {})
            made.finish()
    for rank, step in damaged:
        data = next((tmp_path / str(rank) / f"step-{step:09d}").glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:-10])
    with starters(2, partial(load_own, folder=tmp_path)) as some:
        ends = some.await_ends([0, 1])
    assert [end["step"] for end in ends] == [loads, loads]
    assert [end["weight"] for end in ends] == [[[float(loads)] * 2] * 2] * 2
