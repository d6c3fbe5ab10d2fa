"""Groups of up to 4,096 ranks, simulated: the model of costs, cuts and deaths."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import simulated_plans
from lab.limits import limit, seed
from lab.simulated_plans import NOTHING

Program = Callable[..., Path]
Run = dict[str, Any]


def lines(program: Path, *words: object, seconds: float = 110) -> list[Run]:
    done = subprocess.run(
        [program, *map(str, words)], capture_output=True, text=True, timeout=limit(seconds)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def predicted(run: Run) -> float:
    """Say what `ringcomm plan simulate` expects of it, where memory and adding up cost nothing."""
    network = NOTHING._replace(alpha=run["alpha"], beta=run["beta"])
    hosts = run["ranks"] // run["local"]
    algorithm = None if run["collective"] == "barrier" else run["algorithm"]
    call = run["collective"], algorithm, run["bytes"], run["ranks"], hosts
    return simulated_plans.seconds(*call, network)


# Frames have headers, and a call's first frame to a peer has one before it that names the call:
# the model counts neither.
CALLS = [
    ("all_reduce", 1024, 64, 1, "doubling"),
    ("all_reduce", 65536, 64, 1, "ring"),
    ("all_reduce", 65536, 256, 1, "doubling"),
    ("all_reduce", 1024, 256, 8, "hierarchical"),
    ("all_gather", 65536, 64, 1, "ring"),
    ("reduce_scatter", 65536, 64, 1, "ring"),
    ("broadcast", 65536, 64, 1, "ring"),
    ("barrier", 0, 256, 1, "dissemination"),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call)))
def test_the_model_foretells_simulated_groups(
    cpp_program: Program, call: tuple[object, ...]
) -> None:
    (run,) = lines(cpp_program("wide_sim"), "--call", *call)
    assert 0.98 < run["seconds"] / predicted(run) < 1.2, run


def test_a_group_under_cuts_computes_the_same(cpp_program: Program) -> None:
    (run,) = lines(cpp_program("wide_sim"), "--cuts", 64, seed(), 2)
    assert run["cuts"] > 100


@pytest.mark.parametrize("local", [1, 8])
def test_a_death_reaches_every_rank(cpp_program: Program, local: int) -> None:
    (run,) = lines(cpp_program("wide_sim"), "--death", 512, local, seed())
    assert (run["know"], run["misled"]) == (511, 0)
    assert run["last_seconds"] < 1
    assert run["frames_max"] < 100


def test_the_store_is_asked_a_few_times_by_each_rank(cpp_program: Program) -> None:
    (few,) = lines(cpp_program("meeting_sim"), "--meet", 128, 8, 2000)
    (many,) = lines(cpp_program("meeting_sim"), "--meet", 1024, 8, 2000)
    assert many["failed"] == 0
    assert many["seconds"] < 5 + 0.002 * 1024
    assert many["requests_median"] < 2 * few["requests_median"]
    assert many["bytes_median"] < 2 * few["bytes_median"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_4096_ranks_meet(cpp_program: Program) -> None:
    for spread in (0, 2000):
        (run,) = lines(cpp_program("meeting_sim"), "--meet", 4096, 8, spread, seconds=300)
        assert run["failed"] == 0
        assert run["seconds"] < 5 + 0.002 * 4096
        assert run["requests"] < 100 * 4096


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_4096_ranks(cpp_program: Program) -> None:
    program = cpp_program("wide_sim")
    (run,) = lines(program, "--call", "all_reduce", 1024, 4096, 1, seconds=600)
    assert 0.98 < run["seconds"] / predicted(run) < 1.2, run
    assert run["sessions_max"] <= 12
    (run,) = lines(program, "--death", 4096, 1, seed(), seconds=900)
    assert (run["know"], run["misled"]) == (4095, 0)
    assert run["last_seconds"] < 1
