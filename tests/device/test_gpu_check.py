"""benchmarks/gpu_check.py: every stage runs on the simulated device, and notices what is wrong."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT
from lab.limits import limit
from lab.simulated_device import SIMULATED
from lab.simulated_plans import Shape, plans_of

FOLDER = ROOT / "benchmarks"
LIBRARY = "RINGCOMM_CUDA_LIBRARY"
MARK = "TEST_OF_GPU_CHECK"
STAGES = [
    "build", "probe", "plans", "torch", "faults",
    "bandwidth", "latency", "symmetric", "ddp", "cpu", "sanitizer",
]  # fmt: skip


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the benchmarks by name: `module("gpu.table")`."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def check(folder: Path, *arguments: str, seconds: float = 110) -> subprocess.CompletedProcess[str]:
    """Run it on the simulated device. Nothing that it started may outlive it."""
    assert SIMULATED.exists(), "the simulated device is not built: run `make test`"
    command = [sys.executable, str(FOLDER / "gpu_check.py"), "--simulated", "--out", str(folder)]
    environment = {**os.environ, MARK: str(folder), LIBRARY: str(SIMULATED)}
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=limit(seconds),
        env=environment,
    )
    end = time.monotonic() + 5
    while (left := marked(str(folder))) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left
    return done


def marked(value: str) -> list[str]:
    """Return the command lines of the processes that have inherited our mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={value}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text(encoding="utf-8"))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return found


def body_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    assert body["benchmark"] == "gpu_check"
    assert {"gpu", "cpu", "cores", "torch", "ringcomm", "date"} <= body["machine"].keys()
    return body


def good(done: subprocess.CompletedProcess[str], folder: Path) -> dict[str, Any]:
    """Every stage has rows, and none has failed."""
    body = body_of(folder)
    failed = [row for row in body["rows"] if row["verdict"] == "fail"]
    output = [stage["output"] for stage in body["stages"] if stage["output"]]
    assert not failed, output
    assert done.returncode == 0, done.stderr
    assert [stage["stage"] for stage in body["stages"]] == STAGES
    assert {row["stage"] for row in body["rows"]} == set(STAGES)
    assert "passed, 0 failed" in done.stdout
    return body


@pytest.mark.slow
def test_every_stage_works_on_the_simulated_device(tmp_path: Path) -> None:
    body = good(check(tmp_path, "--short"), tmp_path)
    assert all(row["verdict"] == "info" for row in body["rows"] if row["target"])
    table = (tmp_path / "table.txt").read_text(encoding="utf-8")
    page = (tmp_path / "table.md").read_text(encoding="utf-8")
    for row in body["rows"]:
        assert row["what"] in table
        assert f"| {row['stage']} | {row['what']} |" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_works_at_length(tmp_path: Path) -> None:
    body = good(check(tmp_path, "--seconds", "800", seconds=850), tmp_path)
    assert len(body["rows"]) > 90


def test_what_is_unknown_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "--only", "bandwith")
    assert done.returncode == 2
    assert "there is no stage 'bandwith': choose from build, probe," in done.stderr
    done = subprocess.run(
        [sys.executable, FOLDER / "gpu_check.py", "--simulated", "--out", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, LIBRARY: "/nowhere/lib.so"},
    )
    assert done.returncode == 1
    assert "there is no simulated one at /nowhere/lib.so: build it by" in done.stderr


# ---- stages


def test_a_stage_that_is_late_is_ended_and_no_time_is_left(tmp_path: Path) -> None:
    done = check(tmp_path, "--only", "plans,torch", "--seconds", "5")
    assert done.returncode == 1
    body = body_of(tmp_path)
    last = [row for row in body["rows"] if row["what"] == "the whole stage"]
    assert [row["verdict"] for row in last] == ["fail", "fail"]
    assert last[0]["note"].startswith("ended at its limit of 5 s; ")
    assert last[1]["note"] == "not run: the 5 s for all stages were over"
    assert body["stages"][0]["status"] == "ended at its limit"


def test_parts_that_fail_are_rows(module: Any) -> None:
    stages, table = module("gpu.stages"), module("gpu.table")

    def fails() -> Any:
        yield table.passed("one")
        raise ValueError("Traceback (most recent call last):\n  somewhere\nKeyError: 'deep'\n")

    def works() -> Any:
        yield table.info("two")

    rows = list(stages.parts(fails, works))
    assert [(row.what, row.verdict) for row in rows] == [
        ("one", "pass"),
        ("fails", "fail"),
        ("two", "info"),
    ]
    assert rows[1].note == "KeyError: 'deep'"


def test_groups_keep_their_time(module: Any) -> None:
    stages, check_module = module("gpu.stages"), module("gpu_check")
    assert [stage.name for stage in stages.STAGES] == STAGES
    for group in (1, 2, 3, 4):
        seconds = [stage.seconds for stage in stages.STAGES if stage.group == group]
        assert sum(seconds) <= check_module.GROUP_SECONDS


# ---- what is judged


def test_targets(module: Any) -> None:
    table = module("gpu.table")
    assert table.at_least(80, "x", 80, "%").verdict == "pass"
    assert table.at_least(80, "x", 79.9, "%").verdict == "fail"
    assert table.at_most(15, "x", 15, "µs").verdict == "pass"
    assert table.at_most(15, "x", 15.1, "µs").verdict == "fail"
    assert table.at_most(15, "x", 99, "µs").unjudged().verdict == "info"
    assert table.failed("wrong", "sums").unjudged().verdict == "fail"  # no figure: still wrong


def test_tables(module: Any, tmp_path: Path) -> None:
    table = module("gpu.table")
    rows = [
        table.Row("a|b", 12.345, "µs", "≤ 15", "pass", "two\nlines", stage="one"),
        table.Row("c", stage="two", verdict="fail"),
    ]
    text = table.to_text(rows).splitlines()
    assert text[2].split() == ["one", "a|b", "12.3", "µs", "≤", "15", "pass", "two"]
    page = table.to_markdown(rows, {"gpu": "X"})
    assert "| one | a\\|b | 12.3 | µs | ≤ 15 | pass | two lines |" in page
    assert "| two | c |  |  |  | **fail** |  |" in page
    assert "1 passed, 1 failed, 0 without a verdict" in page
    assert [table.show(figure) for figure in (0.12345, 1.2345, 123.4, 7.0, -2.5)] == [
        "0.123", "1.23", "123", "7", "-2.50",
    ]  # fmt: skip
    file = tmp_path / "rows"
    for row in rows:
        table.append(file, row)
    with file.open("a") as more:
        more.write('{"what": "cut sho')
    assert table.load(file) == rows


def test_other_results_than_the_cpus_are_noticed(module: Any) -> None:
    plans = module("gpu.plans")
    import torch

    case = plans.Case("all_reduce", None, torch.float32, "SUM", "1001")
    direct = plans.Case("all_reduce", "direct", torch.float32, "SUM", "1001")
    cases, cpu = [case, direct], [["a", "b"], ["a", "b"]]
    assert plans.compare(cases, cpu, cpu) == []
    assert plans.compare(cases, [["a", "b"], ["x", "b"]], cpu) == [
        "all_reduce float32[1001] SUM by the table: ranks differ"
    ]
    assert plans.compare(cases, [["a", "x"], ["a", "x"]], cpu) == [
        "all_reduce float32[1001] SUM by direct: not as on the CPU"
    ]
    assert plans.as_direct(cases, ["a", "a"]) == ([case], [])
    assert plans.as_direct(cases, ["a", "b"])[1] != []


def test_survivors_are_judged(module: Any) -> None:
    faults = module("gpu.faults")
    seen = ("DistBackendError", "all_reduce #3: Connection closed by rank 2: its process died")
    assert faults.judge("x", {0: (*seen, 11.0, 0.1)}, 2, 2.0, 10.0).verdict == "pass"
    assert faults.judge("x", {0: (*seen, 13.0, 0.1)}, 2, 2.0, 10.0).verdict == "fail"  # late
    assert faults.judge("x", {0: (*seen, 11.0, 0.1)}, 1, 2.0, 10.0).verdict == "fail"  # whom?
    assert faults.judge("x", {0: ("", "no error", 11.0, 0)}, 2, 2.0, 10.0).verdict == "fail"
    assert faults.judge("x", {0: RuntimeError("it hangs")}, 2, 2.0, 10.0).verdict == "fail"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_rings_traffic_is_that_of_its_plan(module: Any, ranks: int) -> None:
    size = ranks * (1 << 20)
    moved = 0
    for plan in plans_of(Shape("all_reduce", size, ranks), "ring"):
        steps = [step for step in plan["steps"] if step["verb"] in ("copy", "reduce")]
        moved += sum(step["bytes"] * len(step["dst"] + step["src"]) for step in steps)
    assert module("gpu.speed").ring_bytes(size, ranks) == moved


# ---- the probe


def test_rows_of_the_probe(module: Any) -> None:
    build = module("gpu.build")
    row = build.probe_rows("fail\t4 processes: a barrier\t345.2\tµs\t≤ 200\tslow")
    assert row == module("gpu.table").Row(
        "4 processes: a barrier", 345.2, "µs", "≤ 200", "fail", "slow"
    )
    assert build.probe_rows("fail\t2 processes\t\t\t\tended").figure is None


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_the_probe_compiles_and_says_that_there_is_no_gpu(module: Any, tmp_path: Path) -> None:
    program = tmp_path / "gpu_probe"
    assert module("gpu.build").compile_probe(program) == ""
    done = subprocess.run(
        [program, "2,3", "20"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    rows = [module("gpu.build").probe_rows(line) for line in done.stdout.splitlines()]
    assert {row.verdict for row in rows} == {"fail"}
    assert any("cudaSetDevice" in row.note for row in rows)
