"""`ringcomm bench`: nccl-tests' columns, ranks of NCCL that share GPUs, and steps of FSDP2."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bench_cases
import pytest
import torch

from lab.limits import limit
from ringcomm.__main__ import main
from ringcomm.tools.bench import cases, command, measurement, nccl
from ringcomm.tools.bench.sample import Workload


def test_columns_are_those_of_nccl_tests() -> None:
    workload = Workload("all_gather", 1 << 18, 2, cases.Form("float16"))
    places = [workload, replace(workload, form=replace(workload.form, in_place=True))]
    samples = [bench_cases.sample(place, "gloo", False).facts() for place in places]
    title, above, head, units, line, wrong, mean, last = nccl.lines_of(samples)
    assert title == "# all_gather, gloo, 2 ranks"
    assert above.split() == ["#", "out-of-place", "in-place"]
    figures = ["time", "algbw", "busbw", "#wrong"]
    assert head.split() == ["#", "size", "count", "type", "redop", "root", *figures, *figures]
    assert units.split()[:3] == ["#", "(B)", "(elements)"]
    cells = line.split()
    assert cells[:5] == [str(1 << 19), str(1 << 18), "half", "none", "-1"]
    assert cells[5:9] == cells[9:]
    assert cells[8] == "0"
    assert len(line) == len(head)
    assert wrong == "# Out of bounds values : 0 OK"
    assert mean.startswith("# Avg bus bandwidth    : ")
    assert last == ""


def test_what_torch_has_not_and_what_is_refused_is_not_available() -> None:
    workload = Workload("broadcast", 256, 2, cases.Form(in_place=True))
    sample = bench_cases.sample(workload, "ringcomm", True)
    lines = list(nccl.lines_of([sample.facts()]))
    assert lines[0] == "# broadcast, ringcomm, 2 ranks, with busy cores"
    assert lines[4].split()[2:9] == ["float", "none", "0", "N/A", "N/A", "N/A", "N/A"]
    sample.refused, sample.wrong = "not that", 3
    lines = list(nccl.lines_of([sample.facts()]))
    assert lines[4].split()[5:] == ["N/A"] * 8
    assert lines[5] == "# Out of bounds values : 3 FAILED"
    assert lines[6].endswith(": 0")


def test_ranks_of_nccl_that_share_a_gpu_are_hosts_of_their_own() -> None:
    assert nccl.apart(1, 8, 8) == {}
    there = nccl.apart(3, 4, 2)
    assert there["NCCL_HOSTID"] == "host-3"
    assert there["NCCL_P2P_DISABLE"] == "1"


def test_all_is_as_many_ranks_as_gpus_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(text: str, device: str) -> list[int]:
        options = argparse.Namespace(
            ranks=command.ranks(text),
            device=device,
            backends=["ringcomm"],
            ddp=False,
            collectives=None,
        )
        measurement.complete(options)
        counts: list[int] = options.ranks
        return counts

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    assert ranks("all", "cuda") == [8]
    assert ranks("all", "cpu") == [3]
    assert ranks("2,4,2", "cuda") == [2, 4]


def test_without_nccl_one_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    assert main(["bench", "--backends", "ringcomm,nccl", "--device", "cuda"]) == 1
    said = "ringcomm bench: --backends nccl: this torch is built without it\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_steps_of_fsdp2(tmp_path: Path, model: str) -> None:
    out, size = tmp_path / "out.json", ("--width", "64", "--layers", "2", "--batch", "2")
    words = ("--ddp", "--wrapper", "fsdp2", "--model", model, *size, "--steps", "2")
    few = ("--rounds", "2", "--deadline", f"{limit(60):.0f}", "--json", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "ringcomm", "bench", *words, *few],
        capture_output=True,
        text=True,
        timeout=limit(100),
        env={**os.environ, "ZYGOTE_OFF": "1", "RINGCOMM_SHARED_BUFFERS": str(64 << 20)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"FSDP2, {model} of ")
    body = json.loads(out.read_text())
    assert (body["options"]["wrapper"], body["options"]["model"]) == ("fsdp2", model)
    (run,) = body["runs"]
    a_layer = 64 * 64 + 64 if model == "mlp" else 12 * 64 * 64 + 13 * 64
    assert run["parameters"] == 2 * a_layer
    assert run["parameters_equal"] is True
    assert run["backends"].keys() == {"ringcomm", "gloo"}
