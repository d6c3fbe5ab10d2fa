"""Benchmarks compute the right figures, and notice wrong results."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import ROOT
from lab.limits import limit

FOLDER = ROOT / "benchmarks"
COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the benchmarks by name: `module("ringcomm.tools.bench.cases")`."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("1K", 1024), ("4M", 1 << 22), ("2g", 1 << 31)]
)
def test_sizes_are_parsed(module: Any, text: str, size: int) -> None:
    report = module("lab.report")
    assert report.size(text) == size
    assert report.size(report.show_size(size)) == size


@pytest.mark.parametrize("text", ["", "0", "-8", "8Q", "1.5B", "K"])
def test_what_is_no_size_is_refused(module: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        module("lab.report").size(text)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(module: Any, collective: str, factor: float) -> None:
    bandwidths = module("ringcomm.tools.bench.traits").bandwidths
    algbw, busbw = bandwidths(collective, 8_000_000_000, 2.0, 4)
    assert algbw == pytest.approx(4.0)
    assert busbw == pytest.approx(4.0 * factor)


def test_buffers_divide_among_the_ranks(module: Any) -> None:
    elements = module("ringcomm.tools.bench.cases").elements
    assert elements("all_reduce", 1024, 3) == 256
    assert elements("all_gather", 1024, 3) == 255
    assert elements("scatter", 8, 4) == 4  # one element a rank at least
    assert elements("barrier", 1024, 4) == 0


def test_a_call_takes_as_long_as_on_its_slowest_rank(module: Any) -> None:
    assert module("lab.benchmark").slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_that_does_nothing_is_noticed(
    module: Any, monkeypatch: pytest.MonkeyPatch, collective: str
) -> None:
    cases = module("ringcomm.tools.bench.cases")
    for name in ("all_reduce", "all_to_all_single", "broadcast", "reduce", "gather", "scatter",
                 "recv"):  # fmt: skip
        monkeypatch.setattr(cases.dist, name, lambda *_: None)
    monkeypatch.setattr(cases.dist, "isend", lambda *_: torch.futures.Future())
    monkeypatch.setattr(torch.futures.Future, "wait", lambda _: None, raising=False)
    monkeypatch.setattr(cases, "all_gather_single", lambda *_: None)
    monkeypatch.setattr(cases, "reduce_scatter_single", lambda *_: None)
    rank = cases.ROOT if collective in {"reduce", "gather"} else 1
    with pytest.raises(cases.WrongResultError, match=f"{collective} of 48 bytes: "):
        cases.verify(collective, 12, rank, 3)


def test_one_wrong_element_is_noticed(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = module("ringcomm.tools.bench.cases")
    total = cases.values(0, 1000) + cases.values(1, 1000)
    monkeypatch.setattr(cases.dist, "all_reduce", lambda data, _: data.copy_(total))
    cases.verify("all_reduce", 1000, 0, 2)
    total[999] += 1
    with pytest.raises(cases.WrongResultError, match=r"1 of 1000 .* \[999\]: .* instead of"):
        cases.verify("all_reduce", 1000, 0, 2)


def test_ranks_contribute_other_values_at_each_place(module: Any) -> None:
    values = module("ringcomm.tools.bench.cases").values
    assert not (values(0, 99) == values(1, 99)).any()
    assert not (values(0, 99)[1:] == values(0, 99)[:-1]).any()
    assert values(3, 99).max() == 16


def test_shared_memory_is_read_from_smaps(module: Any) -> None:
    areas = [
        "7f00-7f10 rw-s 00000000 00:01 5  /memfd:ringcomm (deleted)\nSize: 64 kB\nPss: 6 kB",
        "7f10-7f20 rw-p 00000000 00:00 0  [heap]\nSize: 128 kB\nPss: 128 kB",
    ]
    assert module("groups").shared_memory("\n".join(areas) + "\n") == (64 << 10, 6 << 10)


def busy_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime, stime
    return ticks / os.sysconf("SC_CLK_TCK")


def test_busy_cores_compute_when_told_and_end_with_an_exception(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZYGOTE_OFF", "1")  # each is the process whose time is read
    benchmark = module("lab.benchmark")
    pids: list[int] = []

    def compute_and_fail() -> None:
        with benchmark.BusyCores(60) as busy:
            pids.extend(process.pid for process in busy.processes)
            before = busy_seconds(pids)
            time.sleep(0.2)
            assert busy_seconds(pids) - before < 0.1  # what is left of their beginning
            before = busy_seconds(pids)
            busy.run()
            end = time.monotonic() + limit(5)
            while busy_seconds(pids) == before and time.monotonic() < end:
                time.sleep(0.02)
            assert busy_seconds(pids) > before
            raise KeyError

    with pytest.raises(KeyError):
        compute_and_fail()
    assert len(pids) == len(os.sched_getaffinity(0))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_losses_that_differ_are_noticed(module: Any) -> None:
    compare = module("convergence").compare

    def rounds(other: float) -> dict[str, list[dict[str, Any]]]:
        return {"ringcomm": [{"losses": [1.0, other]}], "gloo": [{"losses": [1.0, 0.5]}]}

    assert compare(rounds(0.5), 2)["equal_to_the_bit"] is True
    with pytest.raises(SystemExit, match="losses differ by 2e-06"):
        compare(rounds(0.500001), 2)
    assert compare(rounds(0.500001), 4)["equal_to_the_bit"] is False
    with pytest.raises(SystemExit, match=r"losses differ by 0\.17"):
        compare(rounds(0.6), 4)


def test_quantiles_are_those_of_the_calls(module: Any) -> None:
    told = module("tail").quantiles([float(i) for i in range(10001)][::-1])
    assert told == {"median": 5000, "p99": 9900, "p99.9": 9990, "p99.99": 9999, "slowest": 10000}


def test_growth_is_found_where_it_is(module: Any) -> None:
    growth = module("soak").growth
    flat = [{"rss_bytes": 10.0 + i % 3, "threads": 2.0} for i in range(30)]
    assert growth(flat) == {"rss_bytes": 0, "threads": 0}
    leak = [{"rss_bytes": 10.0 + i, "threads": 2.0 + (i > 25)} for i in range(30)]
    assert growth(leak) == {"rss_bytes": 10, "threads": 1}


def test_faults_judges_every_backend(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = module("faults")

    def run(form: Any) -> Any:
        if form.backend == "gloo":
            raise OSError("no such switch")
        return faults.Verdict(form.long, "all exact")

    row = {"done": "this", "wanted": "that", "run": run, "namespaces": False}
    rows = [faults.Fault("a", **row), faults.Fault("b", **row, elsewhere=False)]
    monkeypatch.setattr(faults, "ROWS", [*rows, faults.Fault("c", **row)])
    path = tmp_path / "faults.json"
    arguments = ["faults.py", "--only", "a,b", "--long", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    faults.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| this | that | yes: all exact | **no**: the test itself failed: no such switch |",
        "| this | that | yes: all exact | - |",
    ]
    judged = [
        (row["fault"], row["backend"], row["good"]) for row in json.loads(path.read_text())["rows"]
    ]
    assert judged == [("a", "ringcomm", True), ("a", "gloo", False), ("b", "ringcomm", True)]
    monkeypatch.setattr(sys, "argv", ["faults.py", "--only", "a,d"])
    with pytest.raises(SystemExit, match="no such row: d"):
        faults.main()
