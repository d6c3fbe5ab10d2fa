"""benchmarks/gpu_check.py: every stage runs on the simulated device, and notices what is wrong."""

from __future__ import annotations

import html
import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT
from lab.limits import limit
from lab.simulated_device import SIMULATED

FOLDER = ROOT / "benchmarks"
LIBRARY = "RINGCOMM_CUDA_LIBRARY"
MARK = "TEST_OF_GPU_CHECK"
KINDS = {
    "facts", "probe", "torch", "graphs", "kernels", "meetings", "plans", "faults", "bandwidth",
    "latency", "bench", "ddp", "mps", "cpu", "memcheck", "racecheck", "synccheck",
}  # fmt: skip


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
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={value}".encode() in (process / "environ").read_bytes().split(b"\0"):
                commands.append((process / "cmdline").read_text(encoding="utf-8"))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return commands


def packed(folder: Path) -> dict[str, str]:
    """Return the files of the one archive that lies there, by their names in it."""
    (path,) = folder.iterdir()
    assert path.name.startswith("gpu_check-")
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {
            name.removeprefix("gpu_check/"): file.read().decode()
            for name, file in files.items()
            if file is not None
        }


def body_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(packed(folder)["report.json"])
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
    names = [stage["stage"] for stage in body["stages"]]
    assert {name.partition("-")[0] for name in names} == KINDS
    assert {row["stage"] for row in body["rows"]} == set(names)
    assert "passed, 0 failed" in done.stdout
    return body


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_makes_one_archive(tmp_path: Path) -> None:
    done = check(
        tmp_path,
        "--short",
        "--node",
        "--only",
        "bench-2,fsdp2-2,tune-4",
        "--ranks",
        "2,4",
        seconds=250,
    )
    body, files = body_of(tmp_path), packed(tmp_path)
    assert done.returncode == 0, done.stderr
    assert {stage["stage"] for stage in body["stages"]} == {"bench-2", "fsdp2-2", "tune-4"}
    assert "#wrong" in files["tables/bench_ringcomm_2.txt"]
    assert "FSDP2, transformer" in files["tables/fsdp2_gloo_2.txt"]
    assert "two_shot" in files["tables/kernels_4.txt"]
    assert any("gloo" in row["note"] for row in body["rows"] if row["stage"] == "bench-2")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_stage_works_on_the_simulated_device(tmp_path: Path) -> None:
    body = good(check(tmp_path, "--short", seconds=250), tmp_path)
    assert all(row["verdict"] == "info" for row in body["rows"] if row["target"])
    files = packed(tmp_path)
    assert {
        "report.html",
        "report.txt",
        "tables/bench_gloo_2.txt",
        "logs/torch-2.log",
    } <= files.keys()
    page = files["report.html"]
    for row in body["rows"]:
        assert row["what"] in files["report.txt"]
        assert f"<td>{row['stage']}</td><td>{html.escape(row['what'])}</td>" in page
    for stage in body["stages"]:
        assert f'<td>{stage["stage"]}</td><td class="number">{stage["ranks"]}</td>' in page
        assert f"logs/{stage['stage']}.log" in files


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_stage_works_at_length(tmp_path: Path) -> None:
    body = good(check(tmp_path, seconds=1400), tmp_path)
    assert len(body["rows"]) > 130
    assert {stage["ranks"] for stage in body["stages"]} == {0, 2, 4}


def test_what_is_unknown_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "--only", "bandwith")
    assert done.returncode == 2
    assert "there is no stage 'bandwith': choose from facts, build, probe," in done.stderr
    assert "there is no stage for 3 ranks" in check(tmp_path, "--ranks", "3").stderr
    done = subprocess.run(
        [sys.executable, FOLDER / "gpu_check.py", "--simulated", "--out", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, LIBRARY: "/nowhere/lib.so"},
    )
    assert done.returncode == 1
    assert "there is no simulated one at /nowhere/lib.so: build it by" in done.stderr


# ---- stages


def test_what_no_time_is_left_for_is_listed(tmp_path: Path) -> None:
    names = "graphs,memcheck,synccheck"  # the first takes 40 s, each other one 170 s
    done = check(tmp_path, "--only", names, "--ranks", "2", "--minutes", "2.5")
    assert done.returncode == 0, done.stderr
    status = {stage["stage"]: stage["status"] for stage in body_of(tmp_path)["stages"]}
    assert list(status) == ["graphs-2", "memcheck-2", "synccheck-2"]
    assert status.pop("graphs-2") == "ended"
    assert all(text.startswith("left out: it takes ") for text in status.values())
    last = "left out, for another call: --only memcheck-2,synccheck-2"
    assert last in done.stdout
    assert last in packed(tmp_path)["report.txt"]


def test_an_ended_check_leaves_its_archive(tmp_path: Path) -> None:
    """The part that was done is there, and the stage under way is ended with all its processes."""
    command = [sys.executable, str(FOLDER / "gpu_check.py"), "--simulated", "--out", str(tmp_path)]
    environment = {**os.environ, MARK: str(tmp_path), LIBRARY: str(SIMULATED)}
    with subprocess.Popen(
        [*command, "--only", "plans-2,graphs-2"], stdout=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("plans-2: ")
        end = time.monotonic() + limit(30)
        while not list(tmp_path.glob("gpu_check-*")) and time.monotonic() < end:
            time.sleep(0.05)
        running.terminate()
        running.wait(limit(30))
    assert [stage["stage"] for stage in body_of(tmp_path)["stages"]] == ["plans-2"]
    end = time.monotonic() + limit(5)
    while (left := marked(str(tmp_path))) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


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


# ---- what is judged


def test_targets(module: Any) -> None:
    table = module("gpu.table")
    assert table.at_least(80, "x", 80, "%").verdict == "pass"
    assert table.at_least(80, "x", 79.9, "%").verdict == "fail"
    assert table.at_most(15, "x", 15, "µs").verdict == "pass"
    assert table.at_most(15, "x", 15.1, "µs").verdict == "fail"
    assert table.at_most(15, "x", 99, "µs").unjudged().verdict == "info"
    assert table.failed("wrong", "sums").unjudged().verdict == "fail"  # no figure: still wrong
    missed = table.aim(table.at_most(15, "x", 99, "µs", "why"))
    assert (missed.verdict, missed.target) == ("info", "≤ 15")
    assert missed.note == "target not met; why"


def test_tables(module: Any, tmp_path: Path) -> None:
    table = module("gpu.table")
    rows = [
        table.Row("a|b", 12.345, "µs", "≤ 15", "pass", "two\nlines", stage="one"),
        table.Row("c", stage="two", verdict="fail"),
    ]
    text = table.to_text(rows).splitlines()
    assert text[2].split() == ["one", "a|b", "12.3", "µs", "≤", "15", "pass", "two"]
    table.to_page(rows, {"gpu": "X"}, [], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert '<td>one</td><td>a|b</td><td class="number">12.3</td><td>µs</td>' in page
    assert page.count("<td>two</td><td>c</td>") == 2  # among the failures, too
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

    summed = plans.Case("all_reduce", torch.float32, "SUM", "1001")
    other = plans.Case("all_reduce", torch.float32, "MAX", "1001")
    cases, cpu = [summed, other], [["a", "b"], ["a", "b"]]
    assert plans.compare(cases, cpu, cpu) == []
    assert plans.compare(cases, [["a", "b"], ["x", "b"]], cpu) == [
        "all_reduce float32[1001] SUM: ranks differ"
    ]
    assert plans.compare(cases, [["a", "x"], ["a", "x"]], cpu) == [
        "all_reduce float32[1001] MAX: not as on the CPU"
    ]


def test_survivors_are_judged(module: Any) -> None:
    faults = module("gpu.faults")
    seen = ("DistBackendError", "all_reduce #3: Connection closed by rank 2: its process died")
    assert faults.judge("x", {0: (*seen, 11.0, 0.1)}, 2, 2.0, 10.0).verdict == "pass"
    assert faults.judge("x", {0: (*seen, 13.0, 0.1)}, 2, 2.0, 10.0).verdict == "fail"  # late
    assert faults.judge("x", {0: (*seen, 11.0, 0.1)}, 1, 2.0, 10.0).verdict == "fail"  # whom?
    assert faults.judge("x", {0: ("", "no error", 11.0, 0)}, 2, 2.0, 10.0).verdict == "fail"
    assert faults.judge("x", {0: RuntimeError("it hangs")}, 2, 2.0, 10.0).verdict == "fail"


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
