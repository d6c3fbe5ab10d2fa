"""torch's hooks, from 2.14 on, and its flight recorder, which uses them from 2.15 on."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab import ROOT
from lab.ranks import Rank, Ranks, error_of
from ringcomm.__main__ import main

MINOR = tuple(map(int, torch.__version__.split(".")[:2]))
needs_abort_hooks = pytest.mark.skipif(MINOR < (2, 14), reason="torch has no hooks before 2.14")
needs_completion_hooks = pytest.mark.skipif(
    MINOR < (2, 15), reason="torch's recorder takes no other backends before 2.15"
)


def entries() -> list[dict[str, Any]]:
    """Return what torch's recorder has of ringcomm's operations."""
    dumped = torch._C._distributed_c10d._dump_fr_trace_json(True, False, backend="ringcomm")
    return list(json.loads(dumped).get("entries", []))


def every_call(rank: Rank) -> list[dict[str, Any]]:
    tensor, wide = torch.ones(10), torch.ones(10 * rank.size)
    parts = list(wide.chunk(rank.size))
    for wait in (False, True):
        works = [
            dist.all_reduce(tensor, async_op=wait),
            dist.broadcast(tensor, 0, async_op=wait),
            dist.reduce(tensor, 0, async_op=wait),
            dist.all_gather_into_tensor(wide, tensor, async_op=wait),
            dist.reduce_scatter_tensor(tensor, wide, async_op=wait),
            dist.all_to_all_single(torch.empty_like(wide), wide, async_op=wait),
            dist.gather(tensor, parts if rank.index == 0 else None, 0, async_op=wait),
            dist.scatter(tensor, parts if rank.index == 0 else None, 0, async_op=wait),
        ]
        assert [work is not None for work in works] == [wait] * len(works)
        for work in works:
            if work is not None:
                work.wait()
        peer = (rank.index + 1) % rank.size
        if wait:
            sent = dist.isend(tensor, peer)
            dist.recv(torch.empty(10), (rank.index - 1) % rank.size)
            assert sent is not None
            sent.wait()
    dist.barrier()
    return entries()


@needs_completion_hooks
def test_each_call_is_seen_to_end() -> None:
    """Also synchronous ones, for which torch gets no Work otherwise; and each has its duration."""
    some = Ranks(2)
    for told in some(every_call):
        assert len(told) == 8 * 2 + 3
        assert {entry["state"] for entry in told} == {"completed"}
        assert all(0 < entry["duration_ms"] < 60_000 for entry in told)
        assert sum(entry["is_p2p"] for entry in told) == 2
    some.leave()


def unfinished(rank: Rank) -> tuple[str, float | None]:
    """Ask while an operation waits for the other rank."""
    if rank.index == 1:
        rank.store.wait(["looked"])
    work = dist.all_reduce(torch.ones(3), async_op=True)
    last = entries()[-1]
    if rank.index == 0:
        rank.store.set("looked", "")
    work.wait()
    return last["state"], last.get("duration_ms")


@needs_completion_hooks
def test_a_call_that_waits_is_not_finished() -> None:
    some = Ranks(2)
    assert some(unfinished)[0] == ("scheduled", None)
    some.leave()


def hooked(rank: Rank, ways: str) -> tuple[int, int, str]:
    """Return how often the hooks of a group were called once rank 1 has failed."""
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    calls: list[str] = []
    backend.register_abort_hook(7, lambda: calls.append("kept"))
    backend.register_abort_hook(8, lambda: calls.append("removed"))
    backend.register_abort_hook(9, lambda: 1 // 0)  # a warning, and no more
    backend.unregister_abort_hook(8)
    dist.barrier(group)
    if rank.index == 1:
        backend.abort()
        error = ""
    elif ways == "waits":
        error = error_of(lambda: dist.all_reduce(torch.ones(3), group=group))[0]
    else:  # in no call: it hears of it from the others
        error = "DistBackendError"
    deadline = time.monotonic() + 20
    while not calls and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    return calls.count("kept"), calls.count("removed"), error


@needs_abort_hooks
@pytest.mark.parametrize("ways", ["waits", "computes"])
def test_a_failure_is_told_once(ways: str) -> None:
    some = Ranks(2)
    try:
        assert some(hooked, ways) == [(1, 0, "DistBackendError"), (1, 0, "")]
    finally:
        some.kill()


FR_TRACE = "torch.distributed.flight_recorder.fr_trace"
HANGS = """
import os, sys, time
from datetime import timedelta
import ringcomm, torch, torch.distributed as dist
dist.init_process_group("ringcomm", timeout=timedelta(seconds=2))
dist.barrier()
rank = dist.get_rank()
if rank == 0:
    try:
        dist.all_reduce(torch.ones(7))
    except dist.DistBackendError:
        print("it has failed")
    dist.destroy_process_group()  # at once: torch takes its hooks away
    sys.exit()
deadline = time.monotonic() + 100
while not os.path.exists(f"{sys.argv[1]}{rank}") and time.monotonic() < deadline:
    time.sleep(0.1)
"""


@needs_completion_hooks
def test_both_recorders_blame_the_same_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 never calls. Both ranks write torch's file, also that one, which is in no call."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "torch_"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--local-addr", "127.0.0.1", str(tmp_path / "hangs.py"), str(tmp_path / "torch_")]
    monkeypatch.setenv("RINGCOMM_TRACE", str(tmp_path / "ours"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "it has failed" in done.stdout, done.stderr
    last = [pickle.loads((tmp_path / f"torch_{rank}").read_bytes())["entries"] for rank in (0, 1)]
    assert [entry["state"] for entry in last[0]] == ["completed", "scheduled"]
    assert [entry["state"] for entry in last[1]] == ["completed"]
    analyze = [sys.executable, "-m", FR_TRACE, str(tmp_path), "-p", "torch_"]
    told = subprocess.run(analyze, capture_output=True, text=True)
    assert "collective: ringcomm:all_reduce" in told.stdout + told.stderr
    assert "missing ranks: {1}" in told.stdout + told.stderr
    assert main(["trace", str(tmp_path / "ours")]) == 1
    assert "rank 1 never called all_reduce #2" in capsys.readouterr().out
