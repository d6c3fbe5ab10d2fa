"""benchmarks/gpu: the order of stages, what fits into minutes, what is left, and rivals' failures.

Without a device, real or simulated.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT
from lab.limits import limit
from lab.ranks import RankError


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the benchmarks by name: `module("gpu.table")`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def settings(module: Any, tmp_path: Path) -> Any:
    made: Any = module("gpu.stages").Settings
    return made(
        simulated=False, short=False, library="", probe="", build=False, folder=str(tmp_path)
    )


# ---- the order, and what fits


def test_the_calls_come_first_and_then_all_others(module: Any) -> None:
    stages = module("gpu.stages")
    names = stages.names_of(stages.STAGES)
    in_calls = [name for call in stages.CALLS.values() for name in call]
    assert names[:2] == ["facts", "build"]
    assert [name for name in names[: len(in_calls) + 1] if name != "build"] == in_calls
    assert len(set(names)) == len(names)
    ranks = [stage.ranks for stage in stages.STAGES[len(in_calls) + 1 :]]
    assert ranks == sorted(ranks)
    assert {stage.ranks for stage in stages.STAGES} == {0, 2, 4, 8, 16}


@pytest.mark.parametrize("release", ["4.4.0", "6.8.0-generic"])
def test_a_call_fits_into_eight_minutes(
    module: Any, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    """On a machine of its own, and in a sandbox that has no debugger."""
    stages, check = module("gpu.stages"), module("gpu_check")
    uname = os.uname_result(("Linux", "host", release, "", "x86_64"))
    monkeypatch.setattr(stages.os, "uname", lambda: uname)
    every: list[str] = []
    for number in stages.CALLS:
        options = check.parse(["--call", str(number)])
        chosen = stages.chosen(options.only, options.without, stages.RANKS)
        assert sorted(stages.names_of(chosen)) == sorted(stages.of_call(number))
        assert sum(stage.seconds for stage in chosen) <= stages.CALL_SECONDS
        fit, left_out = stages.fitting(chosen, 60 * options.minutes - check.LAST_SECONDS)
        assert (fit, left_out) == (chosen, [])
        every += stages.of_call(number)
    assert len(set(every)) == len(every)
    assert ("memcheck-2" in every) == (release != "4.4.0")
    assert ("probe-8" in every) == (release == "4.4.0")


def test_every_stage_says_what_it_takes_and_decides(module: Any) -> None:
    for stage in module("gpu.stages").STAGES:
        assert 10 <= stage.seconds <= 180
        assert stage.limit > stage.seconds
        assert stage.decides
        assert callable(stage.function())


def test_stages_are_chosen_by_kind_name_and_ranks(module: Any) -> None:
    stages = module("gpu.stages")

    def names(*arguments: Any) -> list[str]:
        return stages.names_of(stages.chosen(*arguments))

    assert names(["plans"], [], [2, 4]) == ["plans-2", "plans-4"]
    assert names(["plans-4", "plans-2"], [], [2]) == ["plans-2", "plans-4"]
    assert names(["plans-8"], [], [2, 4]) == ["plans-8"]
    assert names(["facts", "plans", "torch"], ["torch-4"], [4]) == ["facts", "plans-4"]
    everything = names([], [], stages.RANKS)
    assert everything == stages.names_of(stages.STAGES)
    assert not {"ddp-2", "ddp-4"} & set(names([], ["ddp"], stages.RANKS))
    assert stages.unknown(["plans", "plans-2", "plans-3", "plan"]) == ["plans-3", "plan"]


def test_a_node_has_stages_of_its_own(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check, stages, ranks = module("gpu_check"), module("gpu.stages"), module("gpu.ranks")
    monkeypatch.setenv(ranks.NODE, "")
    usual = check.parse([])
    assert usual.without == stages.ONLY_NODES
    assert check.parse(["--only", "bench-2,fsdp2"]).without == ["tune"]
    assert ranks.gpus() == 1
    monkeypatch.setattr(check.torch.cuda, "device_count", lambda: 8)
    node = check.parse(["--node"])
    assert node.ranks == [2, 8]
    assert ranks.gpus() == 8
    chosen = stages.chosen(node.only, node.without, node.ranks)
    fit, _ = stages.fitting(chosen, 10 * 60 - check.LAST_SECONDS)
    assert {"build", "plans-8", "latency-8", "bench-8"} <= set(stages.names_of(fit))


def test_what_fits_is_taken_in_order(module: Any) -> None:
    stages = module("gpu.stages")
    some = [
        stages.Stage(kind, 2, seconds, "", "")
        for kind, seconds in (("a", 50), ("b", 60), ("c", 20), ("d", 30))
    ]
    fit, left_out = stages.fitting(some, 100)
    assert [stage.kind for stage in fit] == ["a", "c", "d"]
    assert [stage.kind for stage in left_out] == ["b"]
    assert stages.fitting(some, 0) == ([], some)


# ---- running


@pytest.fixture
def sleeping(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have each stage's process sleep for a minute instead."""
    running = module("gpu.running")
    popen = running.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return popen(["sleep", "60"], **options)

    monkeypatch.setattr(running.subprocess, "Popen", start)
    return running


def test_a_stage_that_hangs_has_failed(module: Any, sleeping: Any, settings: Any) -> None:
    stage = dataclasses.replace(module("gpu.stages").by_name("plans-2"), seconds=-14.5)
    assert stage.limit == 1
    (outcome,) = sleeping.run_stages([stage], settings)
    assert [row.verdict for row in outcome.rows] == ["fail"]
    assert outcome.status == "ended at its limit of 1 s"
    assert outcome.rows[0].note == "ended at its limit of 1 s; 0 rows until then"


def test_the_end_of_the_time_is_no_failure(module: Any, sleeping: Any, settings: Any) -> None:
    stages = module("gpu.stages")
    first = dataclasses.replace(stages.by_name("plans-2"), seconds=0.5)
    second = stages.by_name("torch-2")
    start = time.monotonic()
    outcomes = list(sleeping.run_stages([first, second], settings, start + 1))
    assert time.monotonic() - start < limit(10)
    assert outcomes[0].status.startswith("cut short after 1 s")
    assert [row.verdict for row in outcomes[0].rows] == ["info"]
    assert outcomes[1].left_out
    assert outcomes[1].status == "left out: it takes 75 s, and 0 s were left"
    assert outcomes[1].rows == []


# ---- the archive


def test_the_archive_has_report_tables_and_logs(module: Any, tmp_path: Path) -> None:
    archive, running, stages = module("gpu.archive"), module("gpu.running"), module("gpu.stages")
    folder, out = tmp_path / "folder", tmp_path / "out"
    (folder / "tables").mkdir(parents=True)
    (folder / "plans-2.log").write_text("first line\n" + "x" * archive.LARGEST)
    (folder / "plans-2.rows").write_text("{}")
    (folder / "tables" / "bench_gloo_2.txt").write_text("a table")
    row = module("gpu.table").passed("right", 2, "cases")
    outcomes = [
        running.Outcome(stages.by_name("plans-4"), status="left out: no time"),
        running.Outcome(stages.by_name("plans-2"), [row], 1.5),
    ]
    made = archive.Archive(out, folder)
    for _ in range(2):  # written anew, in the same place
        text = made.write(outcomes, {"gpu": "X"})
    assert "left out, for another call: --only plans-4" in text
    assert list(out.iterdir()) == [made.path]
    with tarfile.open(fileobj=io.BytesIO(made.path.read_bytes())) as packed:
        sizes = {member.name: member.size for member in packed.getmembers()}
        page = packed.extractfile("gpu_check/report.html")
        assert page is not None
        rows = re.findall(r"<tr>(.*?)</tr>", page.read().decode())
    assert sizes.pop("gpu_check/logs/plans-2.log") == archive.LARGEST  # its end
    assert sizes.keys() == {
        "gpu_check/report.txt", "gpu_check/report.html", "gpu_check/report.json",
        "gpu_check/tables/bench_gloo_2.txt",
    }  # fmt: skip
    cells = [re.findall(r"<td.*?>(.*?)</td>", row) for row in rows]
    assert any(row[:5] == ["plans-2", "2", "50", "1.5", "ended"] for row in cells)
    assert any(row[:5] == ["plans-4", "4", "60", "0", "left out: no time"] for row in cells)


# ---- rivals


def test_a_rivals_failure_is_information(module: Any) -> None:
    def fails() -> Iterator[Any]:
        yield module("gpu.table").info("one figure")
        raise RankError(
            "nccl, rank 0: Traceback (most recent call last):\nDistError: Duplicate GPU"
        )

    rows = list(module("gpu.stages").of_a_rival("2 ranks: nccl", fails))
    assert [row.verdict for row in rows] == ["info", "info"]
    assert rows[1].note == "it fails: DistError: Duplicate GPU"


def test_rivals_stand_beside_ours(module: Any) -> None:
    sample = {
        "backend": "ringcomm", "collective": "all_reduce", "in_place": True, "count": 256,
        "bytes": 1024, "median_s": 10e-6, "busbw_gb_per_s": 0.1, "refused": "", "wrong": 0,
    }  # fmt: skip
    other = sample | {"backend": "gloo", "median_s": 25e-6}
    elsewhere = other | {"count": 512}
    refused = other | {"backend": "nccl", "refused": "Duplicate GPU detected"}
    body = {"samples": [sample, other, elsewhere, refused]}
    (row,) = module("gpu.commands").rows_of(body, "2 ranks")
    assert row.what == "2 ranks: all_reduce 1K, in place"
    assert row.note == "0.10 GB/s busbw; gloo 25.0 µs, 2.50 times as long"


def test_a_rival_that_fails_leaves_the_others(
    module: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = module("gpu.commands")

    def run_bench(settings: Any, name: str, size: int, *words: str) -> dict[str, Any]:
        if "nccl" in name:
            raise RankError("Duplicate GPU detected")
        return {"samples": []}

    monkeypatch.setattr(commands, "run_bench", run_bench)
    monkeypatch.setattr(commands, "rivals", lambda settings: ["nccl", "gloo"])
    rows = list(commands.bench(settings, 2))
    assert [(row.what, row.note) for row in rows] == [
        ("2 ranks: nccl", "it fails: Duplicate GPU detected")
    ]


# ---- MPS: a daemon that only says what NVIDIA's would


FAKE = """#!/bin/sh
echo "$$ $*" >>"$FAKE_LOG"
if [ "$1" = -f ]; then
  [ -z "$FAKE_REFUSES" ] || { echo "no permission" >"$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 1; }
  mkfifo "$CUDA_MPS_PIPE_DIRECTORY/control"
  read -r word <"$CUDA_MPS_PIPE_DIRECTORY/control"
  exit 0
fi
[ -p "$CUDA_MPS_PIPE_DIRECTORY/control" ] || exit 1
read -r word
if [ "$word" = quit ]; then echo quit >"$CUDA_MPS_PIPE_DIRECTORY/control"; else echo 4711; fi
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "nvidia-cuda-mps-control"
    path.write_text(FAKE)
    path.chmod(0o755)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls"))
    return str(path)


def test_the_daemon_is_our_own_and_is_ended(
    module: Any, settings: Any, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mps = module("gpu.mps")
    given: list[dict[str, str]] = []

    def measure(size: int, settings: Any, environment: dict[str, str]) -> dict[str, float]:
        given.append(environment)
        return {"all_reduce 8": 2e-5 if not environment else 1e-5}

    monkeypatch.setattr(mps, "run_checks", lambda *_: iter([]))
    rows = list(mps.compared(2, settings, control, measure))
    assert rows[0].figure == 1
    assert rows[1].what == "2 ranks under MPS: all_reduce 8"
    assert rows[1].note == "without 20.0 µs, 2.00 times as long"
    assert given[0] == {}
    assert set(given[1]) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
    assert not Path(given[1]["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    calls = Path(control).with_name("calls").read_text().splitlines()
    daemons = [call.split()[0] for call in calls if call.endswith("-f")]
    assert len(daemons) == 1
    assert not Path(f"/proc/{daemons[0]}").exists()


def test_a_daemon_that_may_not_run_is_information(
    module: Any, settings: Any, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_REFUSES", "1")
    mps = module("gpu.mps")
    (row,) = mps.compared(2, settings, control, lambda *_: {})
    assert row.verdict == "info"
    assert row.note == "not run: the daemon does not start: no permission"
    assert (Path(settings.folder) / "mps_control.log").read_text() == "no permission\n"


def test_ranks_that_fail_under_mps(module: Any, settings: Any, control: str) -> None:
    """Ours are a failure; CUDA's word that the service does not work here is information."""
    mps = module("gpu.mps")

    def failing(text: str) -> Any:
        def measure(size: int, settings: Any, environment: dict[str, str]) -> dict[str, float]:
            if environment:
                raise RankError(text)
            return {}

        return measure

    (row,) = mps.compared(2, settings, control, failing("CUDA error: MPS client failed"))
    assert row.verdict == "info"
    with pytest.raises(RankError, match="a wrong sum"):
        list(mps.compared(2, settings, control, failing("a wrong sum")))
