"""torchft over ringcomm: a replica dies in the all_reduce of the others, comes back, and is healed.

It runs in the environment of examples/clients, which scripts/clients.sh makes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from lab import ROOT
from lab.limits import limit

PYTHON = ROOT / "build" / "clients" / "bin" / "python"
NATIVE = hasattr(torch.distributed, "_reconfigure")
WAYS = [
    pytest.param([], id="wrapper"),
    pytest.param(
        ["--native"],
        id="native",
        marks=pytest.mark.skipif(not NATIVE, reason="torch has no reconfigure() before 2.14"),
    ),
]


def has_torchft() -> bool:
    folders = Path(PYTHON).parent.parent.glob("lib/python3*/site-packages/torchft/manager.py")
    return PYTHON.exists() and any(folders)


@pytest.mark.slow
@pytest.mark.timeout(limit(300))
@pytest.mark.parametrize("words", WAYS)
@pytest.mark.skipif(not has_torchft(), reason="torchft is not here: scripts/clients.sh brings it")
def test_a_replica_dies_and_comes_back(words: list[str]) -> None:
    result = subprocess.run(
        [PYTHON, "-m", "lab.replicas", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit(250),
    )
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert result.stdout.splitlines()[-1] == "replicas=3 healed=True digests=1", said
