"""Ranks that leave in good order, and worlds that are lost as a whole and start again."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lab.course import starters
from lab.limits import limit
from lab.trainee import SAMPLES, Log
from lab.trainees import Event, Trainees, trainees
from ringcomm import elastic
from ringcomm.elastic import transfer
from ringcomm.elastic.checkpoint import Checkpoints
from ringcomm.elastic.transfer import Packed

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


def write_damaged(folder: Path) -> None:
    made = Checkpoints(folder, every=1)
    made.save(5, {"net": {"weight": torch.ones(2, 2)}}, {})
    made.finish()
    data = next((folder / "step-000000005").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-10])


def test_damaged_checkpoints_of_one_rank_are_no_new_beginning(tmp_path: Path) -> None:
    """Nor does the other rank begin anew, which has no checkpoint at all."""
    write_damaged(tmp_path / "1")
    with starters(2, partial(load_own, folder=tmp_path)) as some:
        for number in (0, 1):
            some.processes[number].join(limit(60))
        ends = [some.events(number)[-1] for number in (0, 1)]
    assert [end["what"] for end in ends] == ["raised"] * 2, ends
    assert all("no checkpoint in" in end["text"] for end in ends), ends


def load_of_one_that_dies(world: elastic.World, log: Log, folder: Path) -> None:
    """The rank that has the checkpoint dies while it gives the state to the other one."""
    if os.environ["RANK"] == "1":
        send = transfer.send

        def dying(packed: Packed, group: Any, givers: list[int], joiners: list[int]) -> int:
            if world._saving is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(packed, group, givers, joiners)

        transfer.send = dying
    load_own(world, log, folder)


def test_the_checkpoint_of_a_rank_that_dies_while_it_is_loaded(tmp_path: Path) -> None:
    made = Checkpoints(tmp_path / "1", every=1)
    made.save(5, {"net": {"weight": torch.ones(2, 2)}}, {})
    made.finish()
    with starters(2, partial(load_of_one_that_dies, folder=tmp_path)) as some:
        for number in (0, 1):
            some.processes[number].join(limit(60))
        assert some.processes[1].exitcode == -signal.SIGKILL
        end = some.events(0)[-1]
    assert end["what"] == "raised", end
    assert "the rank with the checkpoint of step 5 was lost while it was loaded" in end["text"]


def behind_the_loop(world: elastic.World, log: Log, folder: Path, leaves: str, steps: int) -> None:
    """Schedule after the block, as most programs do; `leaves`: in which place, if at all."""
    net = torch.nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    sampler = elastic.Sampler(64, 1)
    loader = DataLoader(TensorDataset(torch.ones(64, 1)), batch_sampler=sampler)
    world.track(net=net, opt=opt, sched=sched, sampler=sampler)
    world.checkpoint(folder, every=4)
    log("loaded", step=world.step_number, sched=sched.last_epoch)
    for (x,) in world.batches(loader):
        if leaves == "inside" and world.step_number == steps - 1:
            world.leave()
        with world.step():
            opt.zero_grad()
            net(x).sum().backward()
            opt.step()
        sched.step()
        if leaves != "inside" and world.step_number == steps:
            break
    if leaves == "behind":
        world.leave()
    log("end", step=world.step_number)


@pytest.mark.parametrize(("leaves", "loads"), [("inside", 5), ("behind", 5), ("", 4)])
def test_a_schedule_behind_the_block_is_in_the_checkpoint(
    tmp_path: Path, leaves: str, loads: int
) -> None:
    program = partial(behind_the_loop, folder=tmp_path, leaves=leaves, steps=5)
    with starters(2, program) as some:
        for number in (0, 1):
            some.processes[number].join(limit(60))
        assert newest(tmp_path) == loads
    with starters(2, partial(program, leaves="", steps=loads + 1)) as some:
        some.await_ends([0, 1])
        loaded = [some.events(number, "loaded")[0] for number in (0, 1)]
    assert [(event["step"], event["sched"]) for event in loaded] == [(loads, loads)] * 2
