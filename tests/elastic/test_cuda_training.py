"""Elastic training with tensors of CUDA, on the simulated device.

The ranks train by stock DDP and AdamW. The collectives run in streams that are late, and memory of
the device is shared between processes: all that is the production code, from the reducer's futures
to the words that streams write.

What no simulator shows: the host computes the kernels, and before each it waits for the current
stream. So a wait that is missing between two kernels is not found, one between a collective and a
kernel is. Kernels draw from the generator of the CPU. torch's memory is the heap's, which peers
cannot map. There are no cards, no drivers that fail, and no pinned memory.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.limits import limit, seed
from lab.outcomes import Outcome, in_child
from lab.simulated_device import CUDA, pretend
from lab.trainees import Event, Trainees, trainees
from ringcomm.elastic.checkpoint import Checkpoints
from ringcomm.elastic.state import Tracked

LATE = {"RINGCOMM_SIM_SLOW_US": "300", "RINGCOMM_SIM_RANDOM_US": "700"}
REACHED = ("step", "digest", "buffers", "random")

Fates = tuple[tuple[int, str, int], ...]


@contextmanager
def on_cuda(count: int, settings: dict[str, str] | None = None, **plan: Any) -> Iterator[Trainees]:
    """Trainees whose tensors are on the device."""
    with trainees(count, cuda=True, settings={**CUDA, **(settings or {})}, **plan) as some:
        yield some


def check_whole(some: Trainees, epochs: int = 0) -> None:
    some.check_equal()
    some.check_ledger(epochs)


# ---- deaths


def ends_of(some: Trainees, fates: Fates) -> list[dict[str, Any]]:
    """Return how far those that live have come at the end."""
    dead = [number for number, _, _ in fates]
    rest = [number for number in range(len(some.processes)) if number not in dead]
    ends = some.await_ends(rest)
    check_whole(some, epochs=2)
    assert set(some.deaths()) == set(dead)
    return [{what: end[what] for what in REACHED} for end in ends]


@pytest.mark.parametrize("way", ["auto", "host"])
@pytest.mark.parametrize(
    "fates",
    [
        ((3, "bucket", 8), (0, "voted", 12)),
        pytest.param(
            ((0, "bucket", 4), (2, "bucket", 5), (3, "applied", 9)), marks=pytest.mark.slow
        ),
        pytest.param(((1, "forward", 4), (2, "applying", 6)), marks=pytest.mark.slow),
    ],
)
def test_deaths_change_no_bit(fates: Fates, way: str) -> None:
    """A step counts, or not, as on the CPU; and what the survivors reach is equal to the last bit.

    A rank that dies while buckets are reduced leaves the others with wrong gradients, and with
    streams that go on. Such a step must not count.
    """
    with on_cuda(4, {**LATE, "RINGCOMM_CUDA_MODE": way}, fates=fates) as some:
        ends = ends_of(some, fates)
    with trainees(4, fates=fates) as some:
        assert ends == ends_of(some, fates)


@pytest.mark.parametrize("at", [41, *[pytest.param(n, marks=pytest.mark.slow) for n in (64, 87)]])
def test_a_rank_dies_in_its_stream(at: int) -> None:
    """While the device works for it: the others give up what their streams wait for."""
    faults = {"RINGCOMM_SIM_DIES_AT": str(at), "RINGCOMM_SIM_RANK": "1"}
    with on_cuda(3, {**LATE, **faults}, epochs=2) as some:
        some.await_ends([0, 2])
        assert some.processes[1].exitcode == -signal.SIGKILL
        assert [change["size"] for change in some.events(0, "change")] == [2]
        check_whole(some, epochs=2)


@pytest.mark.parametrize(
    "phase", ["given", *[pytest.param(p, marks=pytest.mark.slow) for p in ("give", "agreed")]]
)
def test_a_giver_dies(phase: str) -> None:
    """While a guest gets the state, which is in memory of the device."""
    with on_cuda(3, LATE, epochs=10**6, fates=((0, phase, 2),)) as some:
        some.await_events([0, 1, 2], "step")
        some.start()
        some.await_events([3], "step", 3)
        assert some.deaths()[0]["phase"] == phase
        check_whole(some)


# ---- many changes


def held(some: Trainees, number: int) -> dict[str, int]:
    """Count shared memory, files and threads of a process."""
    process = Path(f"/proc/{some.processes[number].pid}")
    names = [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
    return {
        "mapped": sum(name.startswith("/memfd:ringcomm") for name in names),
        "files": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
    }


def await_held(some: Trainees, number: int, most: dict[str, int]) -> None:
    """Wait until a process holds no more than that: a release may take a moment."""
    deadline = time.monotonic() + limit(10)
    while any((now := held(some, number))[what] > most[what] for what in most):
        assert time.monotonic() < deadline, f"it holds {now}, and may hold {most}"
        time.sleep(0.01)


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_changes_leave_nothing_behind(kills: int) -> None:
    """Ranks are killed at any time, and others come. No stream stays stuck, nothing stays mapped.

    With operations under way, that is: each group that ends has some.
    """
    draw = random.Random(seed())
    most: dict[str, int] = {}
    with on_cuda(3, LATE, epochs=10**6) as some:
        alive = [0, 1, 2]
        some.await_events(alive, "step")
        for _ in range(kills + 1):
            victim = alive.pop(draw.choice([1, 2]))
            time.sleep(draw.uniform(0, 0.1))  # when, is for chance to decide
            some.kill(victim)
            alive += some.start()
            some.await_events(alive[-1:], "step", 2)
            if most:
                await_held(some, 0, most)
            else:
                most = {what: count + 2 for what, count in held(some, 0).items()}
        for number in alive:
            some.kill(number, signal.SIGTERM)
        ends: list[Event] = some.await_ends(alive)
        assert ends[0]["stats"]["aborted"] >= 1
        check_whole(some)


# ---- what a program has on the device


def test_all_die_and_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    with on_cuda(2, epochs=10**6, folder=str(tmp_path), pause=0.01) as some:
        written = Checkpoints(tmp_path, every=5)
        deadline = time.monotonic() + limit(30)
        while written.newest() is None:
            assert time.monotonic() < deadline, "no checkpoint is written"
            time.sleep(0.01)
        for number in (0, 1):
            some.kill(number)
            some.processes[number].join()
        numbers = some.start(2)
        some.await_events(numbers, "step", 2)
        tracked = some.events(numbers[0], "tracked")[0]
        assert tracked["step"] >= 5
        first, other = (some.events(number, "step")[0] for number in numbers)
        assert (first["step"], first["digest"]) == (other["step"], other["digest"])


def draws() -> Outcome:
    """Draw from CUDA's generator in a step that is computed again."""
    pretend()
    tracked = Tracked(model=torch.nn.Linear(3, 3).to("cuda"))

    def draw() -> list[float]:
        return list(torch.rand(4, generator=torch.cuda.default_generators[0]).tolist())

    tracked.mark()
    first = draw()
    tracked.restore()
    return {"again": draw() == first, "differs": draw() != first}


def test_the_generator_of_cuda() -> None:
    """It is put back with the others. A generator of the CPU stands in for it here."""
    os.environ["RINGCOMM_CUDA_LIBRARY"] = CUDA["RINGCOMM_CUDA_LIBRARY"]
    try:
        assert in_child(draws) == {"again": True, "differs": True}
    finally:
        del os.environ["RINGCOMM_CUDA_LIBRARY"]
