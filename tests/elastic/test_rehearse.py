"""The rehearsal of a training: its faults come, its judge sees what is broken, its page says it."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from lab import ROOT
from ringcomm.elastic.promises import judge

PIDS, STEPS = (11, 12, 13), 20


def journals() -> list[dict[str, Any]]:
    """Three ranks that prefetch nothing; in step 10 one dies, and the others compute it again."""
    lines: list[dict[str, Any]] = []
    queue = 0
    for step in range(1, STEPS + 1):
        ranks = PIDS if step < 10 else PIDS[:2]
        if step == 10:
            lines += [{"at": 9.5, "what": "aborted", "pid": pid} for pid in ranks]
            lines += [{"at": 9.6, "what": "change", "pid": pid, "epoch": 1} for pid in ranks]
        used = list(range(queue, queue + len(ranks)))
        queue += len(ranks)
        for pid in ranks:
            step_line = {"step": step, "digest": step * 7, "used": used, "held": len(ranks)}
            lines.append({"at": float(step), "what": "step", "pid": pid, **step_line})
    return lines


def test_what_is_kept() -> None:
    verdict = judge(journals())
    assert verdict.broken == []
    assert (verdict.steps, verdict.changes, verdict.aborted) == (STEPS, 1, 2)
    assert (verdict.usual, verdict.longest, verdict.seconds) == (1.0, 1.0, STEPS - 1)


Break = Callable[[list[dict[str, Any]]], None]


def at(lines: list[dict[str, Any]], step: int, pid: int) -> dict[str, Any]:
    return next(line for line in lines if line.get("step") == step and line["pid"] == pid)


def differ(lines: list[dict[str, Any]]) -> None:
    at(lines, 7, 12)["digest"] += 1


def deal_otherwise(lines: list[dict[str, Any]]) -> None:
    at(lines, 7, 12)["used"] = [1, 2, 3]


def apply_twice(lines: list[dict[str, Any]]) -> None:
    lines.append(copy.deepcopy(at(lines, 7, 12)))


def leave_a_step_out(lines: list[dict[str, Any]]) -> None:
    for pid in PIDS:
        lines.remove(at(lines, 7, pid))


def use_twice(lines: list[dict[str, Any]]) -> None:
    for pid in PIDS:
        at(lines, 7, pid)["used"] = at(lines, 6, pid)["used"]


def lose_batches(lines: list[dict[str, Any]]) -> None:
    for pid in PIDS:
        at(lines, 7, pid)["used"] = []


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (differ, "step 7: processes 11 and 12 have different parameters"),
        (deal_otherwise, "step 7: processes 11 and 12 have different batches"),
        (apply_twice, "process 12 applied step 7 2 times"),
        (leave_a_step_out, "steps are missing: 7"),
        (use_twice, "batches count twice: 15, 16, 17"),
        (lose_batches, "batches are missing: 3, the first of them 18, 19, 20, and ranks hold 2"),
        (list.clear, "no step was applied"),
    ],
)
def test_what_is_broken_is_told(breaks: Break, text: str) -> None:
    lines = journals()
    breaks(lines)
    assert text in judge(lines).broken


def rehearse(run: Run, *words: object) -> Any:
    # It knows its ranks by their process ids, which those of forked interpreters are not.
    command = [Path(sys.prefix) / "bin" / "python", "-m", "ringcomm", "elastic", "rehearse", *words]
    return run(*command, seconds=200, RINGCOMM_TRACE="off")


def test_an_example_is_rehearsed(run: Run, tmp_path: Path) -> None:
    options = ["--minutes", "0.2", "--every", "1.5", "--seed", "3", "--keep", tmp_path]
    script = [ROOT / "examples" / "elastic.py", "--epochs", "1000000", "--ranks", "3"]
    done = rehearse(run, *options, *script, "--pause", "0.01")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Kept: every step was applied by all members or none" in done.stdout
    faults = re.search(r"faults +(\d+) x kill, (\d+) x stop, (\d+) x leave \(seed 3\)", done.stdout)
    assert faults, done.stdout
    assert sum(map(int, faults.groups())) >= 2
    assert int(re.search(r"steps +(\d+)", done.stdout)[1]) > 50  # type: ignore[index]


@pytest.mark.slow
def test_a_sharded_example_is_rehearsed(run: Run, tmp_path: Path) -> None:
    options = ["--ranks", "4", "--unit", "2", "--minutes", "1", "--every", "1", "--seed", "5"]
    script = [ROOT / "examples" / "elastic_sharded.py", "--epochs", "1000000", "--pause", "0.01"]
    done = rehearse(run, *options, "--keep", tmp_path, *script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Kept: every step was applied by all members or none" in done.stdout
    assert int(re.search(r"changes +(\d+)", done.stdout)[1]) >= 2  # type: ignore[index]


def test_a_script_that_fails_is_shown(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no data at /nowhere')\n")
    done = rehearse(run, "--ranks", "2", "--keep", tmp_path / "kept", script)
    assert done.returncode == 1
    assert "ended with status 1, and no fault has done it" in done.stdout
    assert "no data at /nowhere" in done.stdout
    assert "BROKEN: no step was applied" in done.stdout


def test_journals_of_another_rehearsal_are_not_judged(run: Run, tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").touch()
    done = rehearse(run, "--keep", tmp_path, "train.py")
    assert done.returncode == 1
    assert "has the journals of another rehearsal" in done.stderr
    assert "give --keep another folder" in done.stderr
