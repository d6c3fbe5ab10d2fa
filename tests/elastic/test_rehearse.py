"""The rehearsal of a training: its faults come, its judge sees what is broken, its page says it."""

from __future__ import annotations

import copy
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run

from lab import ROOT
from ringcomm.elastic import journal
from ringcomm.elastic.checkpoint import Checkpoints
from ringcomm.elastic.promises import judge, look_at_disk
from ringcomm.tools import cuts

PIDS, STEPS = (11, 12, 13), 20


def journals() -> list[dict[str, Any]]:
    """Three ranks that prefetch nothing; in step 10 one dies, and the others compute it again."""
    lines: list[dict[str, Any]] = []
    queue = 0
    for step in range(1, STEPS + 1):
        ranks = PIDS if step < 10 else PIDS[:2]
        if step == 10:
            lines += [{"at": 9.5, "what": "aborted", "pid": pid} for pid in ranks]
            lines.append({"at": 9.0, "what": "kill", "pid": PIDS[2]})
            change = {"at": 9.6, "what": "change", "epoch": 1, "lost": [PIDS[2]], "why": ["ended"]}
            lines += [{**change, "pid": pid} for pid in ranks]
        used = list(range(queue, queue + len(ranks)))
        queue += len(ranks)
        for pid in ranks:
            step_line = {"step": step, "digest": step * 7, "used": used, "held": len(ranks)}
            lines.append({"at": float(step), "what": "step", "pid": pid, **step_line})
        if step % 2 == 0:
            lines.append(checkpoint(step))
    lines += [{"at": 11.5, "what": "fill", "pid": 11}, {"at": 12.7, "what": "freed", "pid": 1}]
    return sorted(lines, key=lambda line: float(line["at"]))


def checkpoint(step: int) -> dict[str, Any]:
    """One that is made after each second step; that of step 12 finds the disk full."""
    told = {"at": step + 0.6, "began": step + 0.1, "pid": PIDS[0], "step": step, "folder": "f"}
    return told | ({"what": "unsaved", "why": "full"} if step == 12 else {"what": "checkpoint"})


def test_what_is_kept() -> None:
    verdict = judge(journals())
    assert verdict.broken == []
    assert (verdict.saved, verdict.unsaved) == (9, 1)
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


def lose_a_member(lines: list[dict[str, Any]]) -> None:
    change = {"what": "change", "epoch": 2, "lost": [12], "why": ["silent"]}
    lines.append({"at": 15.5, "pid": 11, **change})


def lose_a_checkpoint(lines: list[dict[str, Any]]) -> None:
    index = next(i for i, line in enumerate(lines) if line["what"] == "checkpoint")
    lines[index] = {**lines[index], "what": "unsaved", "why": "Permission denied"}


def write_none_later(lines: list[dict[str, Any]]) -> None:
    lines[:] = [line for line in lines if line.get("began", 0) < 12.7]


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (lose_a_member, "process 12 was lost (silent), and it had not ended"),
        (lose_a_checkpoint, "the checkpoint of step 2 could not be written: Permission denied"),
        (write_none_later, "no checkpoint was made after the disk had been full"),
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


# ---- faults

RANKS = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
mate = os.fork()
if mate == 0:
    socket.create_connection(listener.getsockname()).recv(1)
    sys.exit()
store = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
end, _ = listener.accept()
print(mate, flush=True)
print(end.recv(1), flush=True)
os.waitpid(mate, 0)
print("both saw it", flush=True)
sys.stdin.read()
"""
PYTHON = Path(sys.prefix) / "bin" / "python"  # itself: a forked interpreter has another process id


def test_only_connections_between_ranks_are_cut() -> None:
    """Two processes see theirs end, and the one to the store stays."""
    listener = socket.create_server(("127.0.0.1", 0))
    command = [str(PYTHON), "-c", RANKS, str(listener.getsockname()[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        mate, (store, _) = int(rank.stdout.readline()), listener.accept()
        assert cuts.cut(rank.pid, [os.getpid() + (1 << 22)]) == 0  # there is no such process
        assert cuts.cut(rank.pid, [mate]) == 1
        assert rank.stdout.readline() == b"b''\n"
        assert rank.stdout.readline() == b"both saw it\n"
        store.setblocking(False)
        with pytest.raises(BlockingIOError):
            store.recv(1)
        rank.kill()


def test_a_checkpoint_finds_the_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails by the system's own error, the older one stays whole, and the next one is written.

    And a checkpoint that is damaged is told.
    """
    journals, folder = tmp_path / "journals", tmp_path / "checkpoints"
    journals.mkdir()
    monkeypatch.setenv("RINGCOMM_ELASTIC_JOURNAL", str(journals))
    checkpoints = Checkpoints(folder, every=1, log=lambda _: None)
    state = {"net": torch.nn.Linear(3, 3).state_dict()}
    checkpoints.save(1, state, {})
    checkpoints.finish()
    (journals / journal.FULL).touch()
    checkpoints.save(2, state, {})
    with pytest.raises(RuntimeError, match="No space left on device"):
        checkpoints.finish()
    lines = journal.read(journals, journal.CHECKPOINTS)
    assert [(line["what"], line["step"]) for line in lines] == [("checkpoint", 1), ("unsaved", 2)]
    assert look_at_disk(lines) == []
    (journals / journal.FULL).unlink()
    checkpoints.save(3, state, {})
    checkpoints.finish()
    lines = journal.read(journals)
    assert (lines[-1]["what"], lines[-1]["step"]) == ("checkpoint", 3)
    assert look_at_disk(lines) == []
    next((folder / "step-000000003").glob("*.distcp")).write_bytes(b"damaged")
    (told,) = look_at_disk(lines)
    assert told == f"the checkpoint of step 3 in {folder} is not whole any more"


def rehearse(run: Run, *words: object) -> Any:
    command = [PYTHON, "-m", "ringcomm", "elastic", "rehearse", *words]
    return run(*command, seconds=200, RINGCOMM_TRACE="off")


def test_an_example_is_rehearsed(run: Run, tmp_path: Path) -> None:
    options = ["--minutes", "0.2", "--every", "1.5", "--seed", "3", "--keep", tmp_path / "kept"]
    script = [ROOT / "examples" / "elastic.py", "--epochs", "1000000", "--ranks", "3"]
    done = rehearse(run, *options, *script, "--pause", "0.01", "--checkpoints", tmp_path / "c")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Kept: every step was applied by all members or none" in done.stdout
    counts = re.findall(r"(\d+) x (\w+)", done.stdout)
    assert [name for _, name in counts] == ["kill", "stop", "leave", "cut", "fill"]
    assert sum(int(count) for count, _ in counts) >= 2
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
