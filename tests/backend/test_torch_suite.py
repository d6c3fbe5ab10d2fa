"""PyTorch's own tests of a backend, on ours: see torch_suite.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lab import ROOT
from lab.limits import seed

# It reads the backend's name out of C++, which for every plug-in is "custom".
MAY_FAIL = {"test_ddp_logging_data_cpu"}

# How many pass on Gloo, by the number of ranks, with torch 2.13: as many must be run here. Other
# versions have a few tests more or less.
GLOO = {2: 90, 3: 90, 4: 93}
SLACK = 0 if torch.__version__.startswith("2.13.") else 10

SUITE = Path(__file__).with_name("torch_suite.py")
Suite = Callable[..., dict[str, str]]


@pytest.fixture
def suite(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> Suite:
    """Run the suite; the reason by test for what failed, and "" for what passed."""

    def run_suite(*options: str, seconds: float = 280, **environment: str) -> dict[str, str]:
        command = [sys.executable, SUITE, "--json", tmp_path / "json"]
        done = run(*command, *options, seconds=seconds, **environment)
        assert (tmp_path / "json").exists(), done.stdout + done.stderr
        tests = json.loads((tmp_path / "json").read_text())
        print(done.stdout[done.stdout.rfind("ranks: ") :])
        return {name: test["why"] for name, test in tests.items() if test["outcome"] != "skipped"}

    return run_suite


def check(ran: dict[str, str], at_least: int) -> None:
    failed = {name: why for name, why in ran.items() if why and name not in MAY_FAIL}
    assert not failed, "\n\n".join(f"{name}: {why}" for name, why in failed.items())
    assert len(ran) >= at_least, f"only {len(ran)} tests were run"


WHOLE = [
    pytest.param(2, "OFF", marks=pytest.mark.slow),
    pytest.param(2, "DETAIL", marks=pytest.mark.slow),
    pytest.param(3, "OFF", marks=pytest.mark.slow),
    pytest.param(4, "OFF", marks=pytest.mark.slow),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "debug"), WHOLE)
def test_as_gloo(suite: Suite, ranks: int, debug: str) -> None:
    """All that Gloo passes; profiles name ours."""
    ran = suite("--as", "gloo", "--ranks", str(ranks), TORCH_DISTRIBUTED_DEBUG=debug)
    check(ran, GLOO[ranks] - SLACK)


def test_some_as_gloo(suite: Suite) -> None:
    """One in four, others each day."""
    part = ["--parts", "4", "--part", str(seed() % 4)]
    check(suite("--as", "gloo", "--ranks", "2", *part), GLOO[2] // 4 - 12)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_as_gloo_on_simulated_devices(suite: Suite, ranks: int) -> None:
    """All but what no stream can do: find out whose message came."""
    library = ROOT / "build" / "tests" / "libringcomm_sim.so"
    ran = suite("--as", "gloo", "--ranks", str(ranks), RINGCOMM_CUDA_LIBRARY=str(library))
    check(
        {name: why for name, why in ran.items() if "any_source" not in name},
        GLOO[ranks] - SLACK - 3,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_as_mpi(suite: Suite, ranks: int) -> None:
    """Only under this name are all_to_all on CPUs, and groups within less than 8 ranks, tested."""
    match = "all_to_all|(?<!full)_group"
    check(suite("--as", "mpi", "--ranks", str(ranks), "-k", match), 27)


FIRST = "test_all_reduce_sum$|test_send_recv_.*profiler|test_get_backend|test_destroy_group"


@pytest.mark.slow
def test_by_name(suite: Suite) -> None:
    """Nothing of torch is replaced; profiles are looked into."""
    check(suite("-k", FIRST), 8)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_by_name(suite: Suite, ranks: int) -> None:
    check(suite("--ranks", str(ranks)), 60)


@pytest.mark.slow
def test_a_test_that_hangs_is_ended_and_named(suite: Suite) -> None:
    ran = suite("-k", "test_barrier$", "--seconds", "0.1", seconds=30)
    assert list(ran) == ["test_barrier"]
    assert "ranks [0, 1] did not end within 0.1 s" in ran["test_barrier"]


@pytest.mark.slow
def test_a_backend_that_fails_is_found(suite: Suite) -> None:
    ran = suite("-k", "test_get_backend", "--backend", "nowhere", seconds=30)
    assert "nowhere" in ran["test_get_backend"]
