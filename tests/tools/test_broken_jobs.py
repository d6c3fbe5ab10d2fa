"""Ten jobs that break: the first line of `ringcomm trace` says how, in which rank, and where."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lab import ROOT
from lab.limits import limit


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_the_first_line_is_right() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "broken_jobs.py")],
        capture_output=True,
        text=True,
        timeout=limit(90),
    )
    assert done.returncode == 0, done.stdout + done.stderr
