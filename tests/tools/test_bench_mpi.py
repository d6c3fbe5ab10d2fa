"""`ringcomm bench --backends mpi`: ranks that mpirun has started are measured as the others are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lab.limits import limit
from ringcomm.__main__ import main
from ringcomm.tools.bench import mpi, ranks

BENCH = (sys.executable, "-m", "ringcomm", "bench", "--rounds", "2", "--seconds", "0.005")
REASON = "no MPI: it needs mpirun on the path, and mpi4py"
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or find_spec("mpi4py") is None, reason=REASON
)


def bench(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BENCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=limit(200),
        env={**os.environ, "ZYGOTE_OFF": "1", **env},
    )


@needs_mpi
def test_it_stands_beside_the_others(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    what = ("--backends", "ringcomm,gloo,mpi", "--collectives", "all_reduce,broadcast,all_gather")
    done = bench(*what, "--sizes", "8,1M", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads(out.read_text())
    samples = [s for s in body["samples"] if s["backend"] == "mpi"]
    assert [(s["collective"], s["bytes"], s["in_place"]) for s in samples] == [
        *[("all_reduce", size, True) for size in (8, 1 << 20)],
        *[("broadcast", size, True) for size in (8, 1 << 20)],
        *[("all_gather", size, place) for size in (8, 1 << 20) for place in (False, True)],
    ]
    for sample in samples:
        assert (sample["wrong"], sample["refused"], len(sample["rounds_s"])) == (0, "", 2)
        assert 0 < sample["low_s"] <= sample["median_s"] <= sample["high_s"]
    assert body["machine"]["mpi"]
    assert sum(line.startswith("mpi ") for line in done.stdout.splitlines()) == 6


@needs_mpi
def test_every_collective_is_exact(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    some = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,reduce,gather,scatter"
    what = ("--collectives", f"{some},send_recv,barrier", "--types", "int8,bfloat16")
    how = ("--backends", "mpi", "--ops", "sum,max", "--sizes", "1K", "--ranks", "3")
    done = bench(*what, *how, "--rounds", "1", "--seconds", "0", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = json.loads(out.read_text())["samples"]
    for sample in samples:
        half = sample["type"] == "bfloat16" and sample["redop"] != "none"
        assert sample["refused"] == (f"MPI has no {sample['redop']} of bfloat16" if half else "")
        if not half and sample["collective"] != "barrier":
            assert sample["wrong"] == 0, sample
    assert len({s["collective"] for s in samples}) == 10
    assert "mpi refuses some: MPI has no sum of bfloat16" in done.stdout


def break_a_call(rank: ranks.Rank) -> None:
    """Have rank 1 find another result than it must."""
    made = mpi._CALLS["all_reduce"]

    def wrong(given: Any, result: Any, *rest: Any) -> Callable[[], Any]:
        call = made(given, result, *rest)
        return lambda: (call(), result.fill(-1))

    if rank.index == 1:
        mpi._CALLS["all_reduce"] = wrong


@pytest.fixture
def tasks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks import the tasks of this file."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", ":".join(path))


@needs_mpi
@pytest.mark.usefixtures("tasks_here")
def test_wrong_results_are_counted() -> None:
    from ringcomm.tools.bench.cases import Form
    from ringcomm.tools.bench.collectives import count_wrong
    from ringcomm.tools.bench.sample import Job

    job = Job("all_reduce", 4, 2, Form())
    with mpi.MpiRanks(2, limit(60)) as some:
        assert some(count_wrong, job) == [0, 0]
        some(break_a_call)
        assert some(count_wrong, job) == [0, 4]


def die(rank: ranks.Rank) -> None:
    if rank.index:
        os._exit(3)
    mpi.barrier()


@needs_mpi
@pytest.mark.usefixtures("tasks_here")
def test_a_rank_that_dies_is_named_and_none_is_left() -> None:
    some = mpi.MpiRanks(2, limit(60))
    pids = some.pids
    with pytest.raises(ranks.RankError, match=r"mpi, rank 1: died"), some:
        some(die, seconds=20)
    end = time.monotonic() + limit(10)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


@needs_mpi
def test_a_launcher_that_fails_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho; echo '-----'; echo no slots; exit 1\n")
    (tmp_path / "mpirun").chmod(0o755)
    done = bench("--backends", "mpi", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr == "ringcomm bench: mpirun started no ranks: no slots\n"


def test_without_mpi_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    assert main(["bench", "--backends", "ringcomm,mpi"]) == 1
    assert capsys.readouterr().err == (
        "ringcomm bench: --backends mpi: mpirun and mpi4py cannot be found; it needs an installed "
        "MPI and `pip install mpi4py`\n"
    )


@needs_mpi
@pytest.mark.parametrize("words", [["--ddp"], ["--device", "cuda"]])
def test_it_has_tensors_of_the_cpu_only(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--backends", "mpi", *words]) == 1
    assert f"it has no {' '.join(words)}" in capsys.readouterr().err
