"""The tests of one host once more, with TCP in the place of shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import OVER_TCP, file_of

from lab import ROOT

LATER = ["backend", "messages", "contract", "failures", "faults", "departures", "init", "common"]
LATER += ["ddp", "torch_suite"]
CASES = ["collectives", *[pytest.param(name, marks=pytest.mark.slow) for name in LATER]]


@pytest.mark.skipif(OVER_TCP, reason="this is such a run")
@pytest.mark.timeout(1230)
@pytest.mark.parametrize("name", CASES)
def test_over_tcp(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(file_of(name))],
        env={**os.environ, "RINGCOMM_TRANSPORT": "tcp"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,  # its tests have limits of their own
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
