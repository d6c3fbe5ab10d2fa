"""benchmarks/gpu_model.py prints the figures that the page and the committed file have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  the library needs it to be loaded

from lab import ROOT
from lab.limits import limit
from ringcomm import _C

SCRIPT = str(ROOT / "benchmarks" / "gpu_model.py")


def told(*arguments: str) -> list[list[str]]:
    """The tables that it prints, as lines."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=limit(60),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("\n\n")
    return [part.strip().splitlines() for part in parts if part.startswith("|")]


def test_the_page_has_what_the_program_prints(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    tables = told("--markdown", "--json", str(file))
    page = (ROOT / "benchmarks" / "README.md").read_text()
    parts = page.split("<!-- gpu_model -->\n")[1:]
    again = "write them again: `python benchmarks/gpu_model.py --markdown`"
    assert [part.split("\n\n")[0].splitlines() for part in parts] == tables, again
    committed = ROOT / "benchmarks" / "results" / "gpu_model.json"
    assert json.loads(committed.read_text()) == json.loads(file.read_text()), again


def test_what_misses_the_target_says_what_it_needs() -> None:
    """The page says from where on, and how much."""
    body = json.loads((ROOT / "benchmarks" / "results" / "gpu_model.json").read_text())
    rows = body["rows"]
    missed = [row for row in rows if row["ratio"] < row["target"]]
    assert [row["bytes"] for row in missed] == [row["bytes"] for row in rows[-len(missed) :]]
    assert missed[0]["bytes"] == 1 << 20
    assert all(320 < row["needs_gb_per_s"] <= 427.5 for row in missed)
    others = [round(row["ratio"], 1) for row in body["anchors"]]
    assert (min(others), max(others)) == (0.6, 1.6)
    ahead = [row["bytes"] for row in body["anchors"] if (row["nccl"] or 0) > row["model_seconds"]]
    assert max(ahead) == 4 << 20
    assert not any("needs_gb_per_s" in row for row in rows if row not in missed)


def test_others_have_no_figures_of_nccl() -> None:
    (table,) = told("--markdown", "--no-nvlink", "--ranks", "4", "--collective", "all_gather")
    assert all(line.count(" - ") == 3 for line in table[2:])


def test_the_choice_is_the_fastest_of_the_model() -> None:
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        for size in (1, 1000, 1 << 15, 1 << 18, 1 << 20, 1 << 26):
            kernel, seconds = _C.kernel_seconds(collective, 8, size, True, 90)
            assert seconds[kernel] == min(seconds.values())
            assert ("low_latency" in seconds) == (size <= 1 << 15)
    for wrong in (("all_sum", 8), ("all_reduce", 1), ("all_reduce", 33)):
        with pytest.raises(ValueError, match=f"{wrong[0]} of {wrong[1]} ranks"):
            _C.kernel_seconds(*wrong, 1024, True, 90)
