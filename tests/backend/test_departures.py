"""A rank that has finished an operation and goes leaves the slower ones their results.

Here ranks go as fast as they can, many times; tests/cpp/comm/departure_test.cc holds the others
inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import OVER_TCP, Run

from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks, error_of, ranks

ROUNDS = 12
COUNT = 1 << 19


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} ranks".format)
def several(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as some:
        yield some


def calls(rank: Rank, group: Any, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Collectives that may end early on rank 0, with the value of `x` after each."""
    parts = list(x.view(rank.size, -1).unbind())
    mine = torch.full((x.numel() // rank.size,), 1.0)
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(
            x[: mine.numel()], x.clone(), group=group, async_op=True
        ),
        "all_gather": lambda: dist.all_gather(parts, mine, group=group, async_op=True),
        "broadcast": lambda: dist.broadcast(x, 0, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(x, x.clone(), group=group, async_op=True),
    }


def go(rank: Rank, way: str) -> Outcome:
    """How the other ranks fared, by what had failed there, and what the next call said."""
    failed: dict[str, int] = {}
    texts: list[str] = []
    for number in range(ROUNDS):
        group = dist.new_group()
        x = torch.ones(COUNT // rank.size * rank.size)
        some = calls(rank, group, x)
        name = list(some)[number % len(some)]
        work = some[name]()
        if rank.index == 0:
            work.wait()
            if way == "abort":
                group._get_backend(torch.device("cpu")).abort()
            else:
                dist.destroy_process_group(group)
        else:
            kind, text = error_of(work.wait)
            want = float(rank.size) if name in {"all_reduce", "reduce_scatter"} else 1.0
            if not kind and not (x[0] == want and x[x.numel() // rank.size - 1] == want):
                text = "wrong"
            if text:
                failed[f"{name}: {text}"] = failed.get(f"{name}: {text}", 0) + 1
            texts.append(error_of(partial(dist.barrier, group))[1])
        dist.barrier()
        if way == "abort" or rank.index != 0:
            dist.destroy_process_group(group)
    return {"failed": failed, "texts": texts}


@pytest.mark.parametrize("way", ["abort", "destroy"])
def test_who_has_finished_may_go(several: Ranks, way: str) -> None:
    words = "rank 0 failed: abort() was called" if way == "abort" else "rank 0 has left the group"
    for outcome in several(go, way)[1:]:
        assert outcome["failed"] == {}
        assert len(outcome["texts"]) == ROUNDS
        for text in outcome["texts"]:
            assert text.startswith("barrier #2: "), outcome
            assert words in text, outcome


ENDING = """
import os, sys, tempfile, torch, torch.distributed as dist
way, store = sys.argv[1], tempfile.mktemp()
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("ringcomm", init_method=f"file://{store}", rank=rank, world_size=2)
x, y = torch.ones(1 << 20), torch.zeros(1000)
work = dist.all_reduce(x, async_op=True)
if rank == 1:
    work.wait()
    dist.isend(torch.ones(1000), 0).wait()
    sys.stderr = open(os.devnull, "w")
    if way == "kill":
        os.kill(os.getpid(), 9)
    if way == "exit":
        sys.exit(3)
    raise ZeroDivisionError("no more data")
os.waitpid(child, 0)
work.wait()
assert x.eq(2).all()
dist.recv(y, 1)
assert y.eq(1).all()
try:
    dist.barrier()
except dist.DistBackendError as error:
    print(error)
"""
WORDS = {
    "raise": "rank 1 failed: its program ended with ZeroDivisionError: no more data",
    "exit": "rank 1 has left the group",
    # A killed process loses what it has not handed to the kernel yet.
    "kill": "Connection closed by rank 1: its process died",
}


@pytest.mark.parametrize("way", [way for way in WORDS if way != "kill" or not OVER_TCP])
def test_the_end_of_a_program(python: Run, way: str) -> None:
    result = python(ENDING.replace("sys.argv[1]", repr(way)), ZYGOTE_WHOLE="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("barrier #2: " + WORDS[way]), result
