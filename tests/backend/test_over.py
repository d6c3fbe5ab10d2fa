"""Memory that nobody holds goes, and a program ends though a callback runs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import limit
from lab.outcomes import Outcome, in_child, outcome_of, rank_of
from lab.ports import free_port
from lab.ranks import HOST, Rank, Ranks, join

# ---- what nobody holds any more


def dropped(rank: Rank) -> Outcome:
    """Tensors whose operation is over and that nobody holds go without another call."""

    def body() -> Outcome:
        join(rank_of(rank, "dropped"), seconds=30)

        def begin() -> Any:
            tensor = torch.ones(1000)
            work = dist.all_reduce(tensor, async_op=True)
            work.get_future().wait()
            return weakref.ref(tensor)

        control = dist.irecv(torch.zeros(1), 1 - rank.index, tag=9)  # the worker is never idle
        gone = []
        for _ in range(2):
            tensor = begin()
            gc.collect()
            end = time.monotonic() + 10
            while tensor() is not None and time.monotonic() < end:
                time.sleep(0.01)
            gone.append(tensor() is None)
        dist.send(torch.zeros(1), 1 - rank.index, tag=9)
        control.wait()
        return {"gone": gone, **outcome_of(dist.barrier)}

    return in_child(body)


def test_tensors_go_with_their_last_holder(two: Ranks) -> None:
    for outcome in two(dropped):
        assert outcome["gone"] == [True, True], outcome
        assert outcome["kind"] == "", outcome


def status(name: str) -> int:
    """Bytes, from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


def premultiplied(rank: Rank, name: str) -> Outcome:
    """How much memory a PREMUL_SUM of 32 MiB takes, at its peak and afterwards."""

    def body() -> Outcome:
        join(rank_of(rank, f"premul {name}"), seconds=30)
        count, op = 8 << 20, dist._make_nccl_premul_sum(0.5)
        tensor, shard = torch.ones(count), torch.ones(count // rank.size)
        calls: dict[str, Callable[[Any], Any]] = {
            "all_reduce": lambda op: dist.all_reduce(tensor, op=op),
            "reduce": lambda op: dist.reduce(tensor, 0, op=op),
            "reduce_scatter": lambda op: dist.reduce_scatter_tensor(shard, tensor, op=op),
        }
        calls[name.split()[0]](dist.ReduceOp.SUM)  # touches the group's own memory
        tensor.fill_(3)
        if name.endswith("in place"):
            shard = tensor.chunk(rank.size)[rank.index]
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        calls[name.split()[0]](op)
        memory = {"peak": status("VmHWM") - before, "after": status("VmRSS") - before}
        result = shard if name.startswith("reduce_scatter") else tensor
        kept = name == "reduce" and rank.index != 0
        good = bool(result.eq(3 if kept else 1.5 * rank.size).all())
        return {**memory, "good": good, **outcome_of(dist.barrier)}

    return in_child(body)


@pytest.mark.parametrize(
    "name", ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter in place"]
)
def test_premul_sum_keeps_no_copy(two: Ranks, name: str) -> None:
    for outcome in two(premultiplied, name):
        assert outcome["good"], outcome
        assert outcome["after"] < 8 << 20, outcome
        assert outcome["peak"] < 8 << 20, outcome


def multiplied_in_place(rank: Rank, algorithm: str, transport: str) -> Outcome:
    """Each rank's own factor, for messages of a line, of a segment and of many."""

    def body() -> Outcome:
        os.environ |= {"RINGCOMM_ALGORITHM": algorithm, "RINGCOMM_TRANSPORT": transport}
        join(rank_of(rank, f"in place {algorithm} {transport}"), seconds=60)
        op = dist._make_nccl_premul_sum(0.5 * (rank.index + 1))
        sums = sum(0.5 * (index + 1) * (index + 3) for index in range(rank.size))
        wrong = []
        for count in (4, 3000, 300_000):
            tensor = torch.full((count * rank.size,), rank.index + 3.0)
            dist.all_reduce(tensor, op=op)
            scattered = torch.full((count * rank.size,), rank.index + 3.0)
            shard = scattered.chunk(rank.size)[rank.index]
            dist.reduce_scatter_tensor(shard, scattered, op=op)
            reduced = torch.full((count,), rank.index + 3.0)
            dist.reduce(reduced, 0, op=op)
            whole = sums if rank.index == 0 else rank.index + 3.0
            good = tensor.eq(sums).all(), shard.eq(sums).all(), reduced.eq(whole).all()
            wrong += [] if all(good) else [(count, good)]
        alone = [dist.new_group([index]) for index in range(rank.size)][rank.index]
        mine = torch.full((9,), rank.index + 3.0)
        dist.all_reduce(mine, op=op, group=alone)
        wrong += [] if mine.eq(0.5 * (rank.index + 1) * (rank.index + 3)).all() else [mine]
        return {"wrong": wrong, **outcome_of(dist.barrier)}

    return in_child(body)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree", "pairwise", "doubling", "bruck"])
def test_premul_sum_in_place(two: Ranks, algorithm: str, transport: str) -> None:
    for outcome in two(multiplied_in_place, algorithm, transport):
        assert outcome["wrong"] == [], outcome
        assert outcome["kind"] == "", outcome


# ---- the end of a program whose callback runs

CALLBACK = """
import os, sys, threading, time
import torch, torch.distributed as dist
import ringcomm
dist.init_process_group("ringcomm", rank=int(sys.argv[1]), world_size=2)
begun = threading.Event()
def callback(future):
    print("callback begins", flush=True)
    begun.set()
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        time.sleep(0.001)
    print("callback ends", flush=True)
    return future.value()
if sys.argv[1] == "1":
    time.sleep(0.3)  # so that the other one's worker ends it
future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(callback)
begun.wait()
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(("seconds", "code"), [(0.2, 0), (30, 0), (30, 7)])
def test_a_program_ends_though_a_callback_runs(tmp_path: Path, seconds: float, code: int) -> None:
    env = {**os.environ, "MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "ZYGOTE_WHOLE": "1"}
    words = [sys.executable, "-c", CALLBACK]
    some = [
        subprocess.Popen(
            [*words, str(rank), str(seconds), str(code)],
            env=env,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    ends = [(process.communicate(timeout=limit(60)), process.returncode) for process in some]
    assert [end[1] for end in ends] == [code, code], ends
    if seconds < 1:
        for (printed, _), _ in ends:
            assert "callback ends" in printed, ends
