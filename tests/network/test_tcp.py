"""The tests of one host once more, with TCP in the place of shared memory."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import OVER_TCP, run_again

WHOLE = ["backend", "messages", "contract", "failures", "faults", "departures", "init", "common"]
WHOLE += ["collectives", "ddp", "torch_suite"]
CASES: list[Any] = [("collectives", "[3")]  # with 3 ranks
CASES += [pytest.param(name, "", marks=pytest.mark.slow) for name in WHOLE]


@pytest.mark.skipif(OVER_TCP, reason="this is such a run")
@pytest.mark.timeout(1230)
@pytest.mark.parametrize(("name", "only"), CASES)
def test_over_tcp(name: str, only: str) -> None:
    run_again(name, only, RINGCOMM_TRANSPORT="tcp")
