"""Every row of the fault table, done to ringcomm: the short form here, the long one in a soak."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lab import ROOT
from lab.faults.rows import ROWS
from lab.faults.table import Fault, Form, Verdict, table
from lab.namespaces import missing


def name(fault: Fault) -> str:
    return fault.name


def judge(fault: Fault, form: Form) -> None:
    if fault.namespaces and (reason := missing()):
        pytest.skip(reason)
    verdict = fault.run(form)
    print(table([(fault, {form.backend: verdict})]))
    assert verdict.good, verdict.told


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", [row for row in ROWS if row.short], ids=name)
def test_short_form(fault: Fault) -> None:
    judge(fault, Form())


@pytest.mark.soak
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("fault", ROWS, ids=name)
def test_long_form(fault: Fault) -> None:
    judge(fault, Form(long=True))


def test_the_table_says_what_happened() -> None:
    rows = [
        (Fault("a", "this", "that", lambda _: Verdict(True, "")), {"x": Verdict(True, "well")}),
        (Fault("b", "those", "these", lambda _: Verdict(True, "")), {"y": Verdict(False, "ill")}),
    ]
    assert table(rows).splitlines() == [
        "| fault | wanted | x | y |",
        "|---|---|---|---|",
        "| this | that | yes: well | - |",
        "| those | these | - | **no**: ill |",
    ]
    assert len({row.name for row in ROWS}) == len(ROWS)


def over_tls(*names: str) -> None:
    """Processes of the rows live as long as this one, so the table is made by another."""
    words = [sys.executable, "benchmarks/faults.py", "--tls", "--backends", "ringcomm"]
    done = subprocess.run(
        [*words, "--only", ",".join(names)], capture_output=True, text=True, cwd=ROOT
    )
    rows = done.stdout.splitlines()[2:]
    assert len(rows) == len(names), done.stdout + done.stderr
    assert all("| yes: " in row for row in rows), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_every_row_over_tls() -> None:
    over_tls(*(row.name for row in ROWS if row.short))
