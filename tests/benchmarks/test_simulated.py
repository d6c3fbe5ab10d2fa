"""benchmarks/simulated.py, tiny: the model beside the clock, on two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab import ROOT
from lab.limits import limit
from lab.namespaces import missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


def test_the_model_is_put_beside_the_clock(tmp_path: Path) -> None:
    """No figure is judged here: other work of the machine would be."""
    file = tmp_path / "figures.json"
    script = str(ROOT / "benchmarks" / "simulated.py")
    command = [sys.executable, script, "--hosts", "2", "--json", str(file)]
    command += ["--collectives", "all_gather", "--sizes", "64K", "--turns", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(200), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["algorithm"] for row in rows] == ["ring", "pairwise", "bruck"]
    for row in rows:
        assert len(row["measured"]) == 2
        assert 0 < row["simulated"] < 1
        # Half of 64 KiB cannot pass 50 Mbit/s faster, but for what the link lets pass at once.
        assert min(row["measured"]) > 0.7 * (32 << 10) / 6.25e6
    assert "of 3 within 15 %" in done.stdout
