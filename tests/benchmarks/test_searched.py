"""benchmarks/searched.py, tiny: a plan that was searched beside the ring, on four hosts."""

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


@pytest.mark.parametrize(
    ("network", "shards", "rate"), [("uplink", 1, 2.38e6), ("sites", 3, 4.77e6)]
)
def test_a_plan_is_put_beside_the_ring(
    network: str, shards: int, rate: float, tmp_path: Path
) -> None:
    """Other work of the machine may slow it down. Faster than its slow link it cannot be."""
    file = tmp_path / "figures.json"
    script = str(ROOT / "benchmarks" / "searched.py")
    command = [sys.executable, script, "--topologies", network, "--json", str(file)]
    command += ["--collectives", "all_gather", "--sizes", "384K", "--turns", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(200), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["topologies"][network]
    assert row["simulated"]["found"] < row["simulated"]["ring"]
    assert set(row["measured"]) == {"ring", "the library's choice", "found"}
    ranks = 4 if network == "uplink" else 6
    least = shards * row["bytes"] / ranks / rate
    for times in row["measured"].values():
        assert len(times) == 2
        assert min(times) > 0.7 * least
    assert "the ring takes" in done.stdout
